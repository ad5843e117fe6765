"""A notebook as Sphinx is to read it: outputs that a page can show, solutions folded, lessons in order."""

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d2l_utils.book.outputs import make_showable
from d2l_utils.notebooks.builder import read_notebook
from d2l_utils.notebooks.form import HOSTED, joined, normalise, tags

__all__ = ["START", "Page", "anchor", "page", "scripts"]

START = "index"  # what the first notebook's page is called, so that its folder opens with it
WIDGETS = Path(__file__).parents[1] / "widgets"
_REMOTE_IMAGE = re.compile(r"""<img\b[^>]*\bsrc\s*=\s*["']?https?:[^>]*>""", re.IGNORECASE)
_REMOTE_MARKDOWN = re.compile(r"!(\[[^\]]*\]\(\s*https?:)")
_ALT = re.compile(r"""\balt\s*=\s*["']([^"']*)""", re.IGNORECASE)


class Page(NamedTuple):
    """A notebook for Sphinx.

    source: JSON for myst-nb.
    lost: what a reader would miss, a line each, with its cell.
    left_out: what no reader misses.
    """

    source: str
    lost: list[str]
    left_out: list[str]


def anchor(heading: str) -> str:
    """What JupyterLab calls the place of a heading."""
    return heading.replace(" ", "-")


def page(path: Path, paths: Sequence[Path]) -> Page:
    """A notebook as myst-nb is to read it.

    Args:
        path: the notebook.
        paths: all of them, in reading order; the first is the start page and lists the others.

    Raises:
        ValueError: it is no notebook, or a cell is not as nbformat says; the message names file and cell.
    """
    import nbformat

    notebook = _read(path)
    lost, left_out = [], []
    for number, cell in enumerate(notebook.cells, start=1):
        place = f"{path.name}, cell {number}: "
        if cell.cell_type == "code":
            marks = tags(cell)
            hidden = {"solution": "hide-cell", HOSTED: "remove-cell"}
            cell.metadata["tags"] = sorted(marks | {hidden[mark] for mark in marks & set(hidden)})
            missing, idle = make_showable(cell, _latex_is_known)
            lost += [place + what for what in missing]
            left_out += [place + what for what in idle]
        else:
            left_out += [f"{place}leaves out a picture from another host" for _ in range(_keep_pictures_here(cell))]
            cell.source = cell.source.replace(f"({paths[0].name}", f"({START}.ipynb")
    if path == paths[0]:
        lessons = "\n".join(other.stem for other in paths[1:])
        notebook.cells.append(nbformat.v4.new_markdown_cell(f"```{{toctree}}\n:hidden:\n{lessons}\n```"))
    return Page(nbformat.writes(notebook), lost, left_out)


def scripts(player: Path) -> str:
    """The script that plays widgets, with the modules that it plays: from disk, a page may not import files."""
    modules = {path.name: path.read_text(encoding="utf-8") for path in sorted(WIDGETS.glob("*.js"))}
    return f"const MODULES = {json.dumps(modules)};\n{player.read_text(encoding='utf-8')}"


def _read(path: Path) -> Any:
    """A notebook in normal form: whoever saved it last, only cells, tags and outputs remain."""
    import nbformat

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cell ids that are missing or used twice: normalise gives new ones
            notebook = read_notebook(path)
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        raise ValueError(f"{path.name} is no notebook: {type(error).__name__}: {str(error)[:200]}") from None
    broken = None
    try:
        normalise(notebook)
    except (AttributeError, KeyError, TypeError) as error:
        broken = error
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        place = [part + 1 for part in error.absolute_path if isinstance(part, int)]
        cell = f", cell {place[0]}" if place else ""
        raise ValueError(f"{path.name}{cell} is not as nbformat says: {error.message[:200]}") from None
    if broken is not None:
        raise broken
    return notebook


def _keep_pictures_here(cell: Any) -> int:
    """Puts attached pictures into the Markdown, and words or a link where a picture lies on another host; counts those."""
    for name, data in cell.pop("attachments", {}).items():
        for kind, content in data.items():
            cell.source = cell.source.replace(f"(attachment:{name})", f"(data:{kind};base64,{joined(content).strip()})")
    source, images = _REMOTE_IMAGE.subn(lambda tag: (_ALT.search(tag[0]) or ["", ""])[1], cell.source)
    cell.source, markdown = _REMOTE_MARKDOWN.subn(r"\1", source)
    return images + markdown


def _latex_is_known(formula: str) -> bool:
    from d2l_utils.book.maths import mathml

    try:
        mathml(formula, "block")
    except ModuleNotFoundError:
        raise
    except Exception:  # latex2mathml has many kinds of its own
        return False
    return True
