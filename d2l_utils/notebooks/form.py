"""The normal form of a stored notebook: the same text and the same results give the same file.

A cell's tags say how its output is treated:

* no tag: the output is the same on every machine and at every world size; nbval compares it.
* `world-size`: the same on every machine at the world size that is stored; run, but not compared, at another.
* `nbval-ignore-output`: depends on the machine (timings, the device, a path); run, never compared.
* `raises-exception`: the cell is meant to fail; the error's type and message are compared.
* `solution`: an exercise's answer; JupyterLab shows it folded, the tests run it.
* `full-program`: a whole script on show, which may be longer than other cells; one a lesson.
* `hosted`: the builder's own cell, which installs the chapter on a hosted notebook; see `hosted`.
"""

import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d2l_utils.alt_text import alternative_text

HOSTED = "hosted"
TAGS = {"world-size", "nbval-ignore-output", "raises-exception", "solution", "full-program", HOSTED}
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}
ALT = "alt"  # of a picture, in the metadata of its kind: nbconvert's classic HTML and the book read it there
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLAYER = "d2l-player"  # output metadata: what a widget needs to play on a page without a kernel


def tags(cell: Any) -> set[str]:
    """The tags of a cell."""
    return set(cell.metadata.get("tags") or ())


def is_compared(cell: Any) -> bool:
    """Whether nbval compares this cell's output at the stored world size."""
    return cell.cell_type == "code" and "nbval-ignore-output" not in tags(cell)


def comparable(cell: Any) -> list[tuple[str, str]]:
    """What nbval compares of a cell's outputs: (kind, text) pairs; no pictures, widgets or tracebacks."""
    return [
        (kind, text)
        for output in cell.outputs
        for kind, text in texts(output)
        if kind != WIDGET_VIEW and not is_picture(kind) and kind != "traceback"
    ]


def cell_ids(sources: list[str]) -> list[str]:
    """An id for each cell that depends on nothing but its text, so that editing one cell changes one id."""
    seen: dict[str, int] = {}
    ids = []
    for source in sources:
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def normalise(notebook: Any, root: Path | None = None) -> None:
    """Rewrites a notebook in place so that the same text and the same results give the same file.

    Args:
        notebook: an nbformat 4 notebook, run or not.
        root: the checkout; if given, paths of the building machine are shortened where they may stand at all
            (tracebacks, and outputs that are not compared).
    """
    import nbformat

    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell, name in zip(notebook.cells, cell_ids([cell.source for cell in notebook.cells]), strict=True):
        cell.id = name
        marks = sorted(tags(cell))
        cell.metadata.clear()
        if marks:
            cell.metadata["tags"] = marks
        if {"solution", HOSTED} & set(marks):
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            cell.outputs = _merged(cell.outputs)
            for output in cell.outputs:
                _normalise_output(output, cell, root)


def joined(text: Any) -> str:
    return "".join(text) if isinstance(text, list) else str(text)


def texts(output: Any) -> Iterator[tuple[str, str]]:
    if output.output_type == "stream":
        yield output.name, joined(output.text)
    elif output.output_type == "error":
        yield "ename", output.ename
        yield "evalue", output.evalue
        yield "traceback", "\n".join(output.traceback)
    else:
        for kind, content in sorted(output.data.items()):
            yield kind, joined(content)


def _merged(outputs: list[Any]) -> list[Any]:
    """Joins stream chunks as nbval does, all of a name into one; keeps what a `\\r` leaves on screen."""
    kept: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name in streams:
            streams[output.name].text += joined(output.text)
        else:
            output.text = joined(output.text)
            streams[output.name] = output
            kept.append(output)
    for output in streams.values():
        output.text = re.sub(r"^.*\r(?=[^\n])", "", output.text, flags=re.MULTILINE)
    return kept


def is_picture(kind: str) -> bool:
    """Whether an output of this kind is drawn."""
    return kind.startswith("image/")


def _alternative(own: Any, data: Any) -> str:
    """The words in place of a picture: those in its `own` metadata, or the output's text; empty if there are none."""
    given = own.get(ALT) if isinstance(own, dict) else None
    return given or alternative_text(joined(data.get("text/plain", "")))


def _normalise_output(output: Any, cell: Any, root: Path | None) -> None:
    import nbformat

    if output.output_type == "execute_result":
        output.execution_count = cell.execution_count
    data = output.get("data", {})
    if "data" in output:
        own = output.get("metadata", {})
        kept = {key: own[key] for key in {PLAYER} & set(own)}
        for kind in sorted(filter(is_picture, data)):
            if words := _alternative(own.get(kind), data):
                kept[kind] = {ALT: words}
        output.metadata = nbformat.from_dict(kept)
    data.pop(WIDGET_VIEW, None)
    if root is None:
        return
    if output.output_type == "error":
        output.traceback = [_shortened(line, root) for line in output.traceback]
    if not is_compared(cell):
        if output.output_type == "stream":
            output.text = _shortened(output.text, root)
        for kind in data:
            if kind.startswith("text/"):
                data[kind] = _shortened(joined(data[kind]), root)


def _shortened(text: str, root: Path) -> str:
    """The building machine's own folders by the names that a reader knows them by."""
    folders = {
        sys.executable: "python",
        sysconfig.get_paths()["purelib"]: "site-packages",
        sysconfig.get_paths()["scripts"] + "/": "",
        sysconfig.get_paths()["stdlib"]: "lib/python",
        f"{root}/": "",
        str(root): ".",
        str(Path.home()): "~",
    }
    for folder, name in folders.items():
        text = text.replace(folder, name)
    return text
