"""A notebook as Sphinx is to read it: widgets that play or say that they do not, solutions folded, lessons in order."""

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d2l_utils.notebooks.builder import read_notebook
from d2l_utils.notebooks.form import HOSTED, PLAYER, joined, tags

__all__ = ["START", "anchor", "page", "scripts"]

START = "index"  # what the first notebook's page is called, so that its folder opens with it
WIDGETS = Path(__file__).parents[1] / "widgets"


def anchor(heading: str) -> str:
    """What JupyterLab calls the place of a heading."""
    return heading.replace(" ", "-")


def page(path: Path, paths: Sequence[Path]) -> str:
    """A notebook as JSON for myst-nb.

    Args:
        path: the notebook.
        paths: all of them, in reading order; the first is the start page and lists the others.
    """
    import nbformat

    notebook = read_notebook(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _code(cell)
        else:
            cell.source = cell.source.replace(f"({paths[0].name}", f"({START}.ipynb")
    if path == paths[0]:
        lessons = "\n".join(other.stem for other in paths[1:])
        notebook.cells.append(nbformat.v4.new_markdown_cell(f"```{{toctree}}\n:hidden:\n{lessons}\n```"))
    return nbformat.writes(notebook)


def scripts(player: Path) -> str:
    """The script that plays widgets, with the modules that it plays: from disk, a page may not import files."""
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(WIDGETS.glob("*.js"))}
    return f"const MODULES = {json.dumps(modules)};\n{player.read_text(encoding='utf-8')}"


def _code(cell: Any) -> None:
    marks = tags(cell)
    hidden = {"solution": "hide-cell", HOSTED: "remove-cell"}
    cell.metadata["tags"] = sorted(marks | {hidden[mark] for mark in marks & set(hidden)})
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" not in data:
            continue
        words = joined(data["text/plain"])
        if PLAYER in output.metadata:
            data["text/html"] = _player(output.metadata[PLAYER], joined(data["image/png"]), words)
        else:
            options: dict[str, Any] = {"image": {"alt": words}}
            if fields := re.match(r"\[[^;\]]*; ((?:knobs|fields): [^\]]*)\]", words):
                options["figure"] = {"caption": f"In JupyterLab this panel is live. {fields[1].capitalize()}."}
            cell.metadata["mystnb"] = options
        output.metadata = type(output.metadata)()


def _player(stored: Any, picture: str, words: str) -> str:
    """The widget's place: its picture, and what `players.js` needs to put the widget there."""
    state = stored["state"].replace("</", "<\\/")
    return (
        f'<div class="player" data-module="{html.escape(stored["module"])}">'
        f'<img alt="{html.escape(words)}" src="data:image/png;base64,{picture.strip()}">'
        f'<script type="application/json">{state}</script></div>'
    )
