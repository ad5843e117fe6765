"""The rules that a stored lesson keeps, each with the words in which a breach is told."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d2l_utils.alt_text import is_sentence
from d2l_utils.notebooks.form import (
    ALT,
    HOSTED,
    TAGS,
    WIDGET_VIEW,
    comparable,
    is_compared,
    is_picture,
    joined,
    tags,
    texts,
)

MOST_LINES = 16
MOST_BYTES = 1_000_000

_UNSAFE = re.compile(r"<script|<iframe|\bon\w+=", re.IGNORECASE)
_REMOTE = re.compile(r"!\[[^\]]*\]\(\s*https?:|src\s*=\s*[\"']?https?:", re.IGNORECASE)
_WITHOUT_WORDS = re.compile(r"!\[\s*\]|<img\b(?![^>]*\balt\s*=\s*([\"'])(?!\1))", re.IGNORECASE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)[^)]*\)")

# What differs from run to run or from machine to machine, and so may not stand in an output that is compared.
_UNSTABLE = {
    "an absolute path": re.compile(
        r"(?<![\w.:/~-])~?/(?:[\w.+-]+/)+[\w.+-]*|(?<![\w/])/(?:tmp|home|root|usr|var|opt|Users)\b|\b[A-Z]:\\"
    ),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
    "a port": re.compile(r"(?:\d\.\d+\.\d+\.\d+|localhost|\]):\d{2,5}\b|\bport\b[ =:]*\d{2,5}\b", re.IGNORECASE),
    "a process id": re.compile(r"\bpid\b[ =:]*\d+|\bprocess(?: id)?[ =:]+\d{3,}\b", re.IGNORECASE),
    "a timing": re.compile(
        r"\d\s?(?:ns|us|µs|ms)\b|\d\.\d+\s?(?:s|sec|secs|seconds?|min|minutes?)\b|\d\s?[\w]+/s(?:ec)?\b"
    ),
    "a time of day": re.compile(r"\b\d\d:\d\d:\d\d\b|\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d"),
}


def problems(notebook: Any, folder: Path | None = None) -> list[str]:
    """What is wrong with a built notebook, one line each; empty if nothing is.

    Args:
        notebook: an nbformat 4 notebook.
        folder: where it is stored; with it, relative links are followed.
    """
    found = list(_notebook_problems(notebook))
    for number, cell in enumerate(notebook.cells):
        check = _code_problems(cell) if cell.cell_type == "code" else _prose_problems(cell, folder)
        found += [f"cell {number} ({_first_line(cell)}): {problem}" for problem in check]
    return found


def without_words(text: str) -> bool:
    """Whether Markdown holds a picture without an alternative text."""
    return bool(_WITHOUT_WORDS.search(text))


def unsafe(text: str) -> bool:
    """Whether HTML or Markdown holds a script or a frame."""
    return bool(_UNSAFE.search(text))


def fetches(text: str) -> bool:
    """Whether HTML or Markdown makes a browser ask another host for a picture or a script."""
    return bool(_REMOTE.search(text))


def disagreements(text: Any, built: Any) -> list[str]:
    """Where a notebook differs from the text that it was built from, both in normal form, one line each."""
    found = []
    if len(text.cells) != len(built.cells):
        found.append(f"the text has {len(text.cells)} cells, the notebook {len(built.cells)}")
    for number, (wanted, cell) in enumerate(zip(text.cells, built.cells, strict=False)):
        for what in ("cell_type", "source", "metadata", "id"):
            if wanted[what] != cell[what]:
                found.append(f"cell {number} ({_first_line(wanted)}): {what} differs from the text")
                break
    if text.metadata != built.metadata:
        found.append("the notebook's metadata differ from what a build writes")
    return found


def _notebook_problems(notebook: Any) -> Iterator[str]:
    import nbformat

    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield f"the kernel is {notebook.metadata.get('kernelspec', {}).get('name')!r}, not 'python3'"
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and HOSTED not in tags(cell)]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"cells were not each run once, in order: execution counts {counts}"
    if code and not any(is_compared(cell) and comparable(cell) for cell in code):
        yield "no output is compared"
    if sum("full-program" in tags(cell) for cell in code) > 1:
        yield "more than one cell is tagged full-program"
    size = len(nbformat.writes(notebook).encode())
    if size >= MOST_BYTES:
        yield f"{size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}"


def _prose_problems(cell: Any, folder: Path | None) -> Iterator[str]:
    if fetches(cell.source):
        yield "fetches something from the network"
    if without_words(cell.source):
        yield "holds a picture without an alternative text"
    if unsafe(cell.source):
        yield "holds HTML that GitHub and an untrusted JupyterLab drop"
    if re.search(r"^(```|:::+)\{", cell.source, re.MULTILINE):
        yield "holds a MyST directive, which Jupyter shows as code"
    for target in _LINK.findall(cell.source) if folder else ():
        if not re.match(r"[a-z]+:", target) and not (folder / target).exists():
            yield f"links to {target}, which does not exist"


def _code_problems(cell: Any) -> Iterator[str]:
    if unknown := tags(cell) - TAGS:
        yield f"unknown tags {sorted(unknown)}; known are {sorted(TAGS)}"
    lines = sum(bool(line.strip()) for line in cell.source.splitlines())
    if lines > MOST_LINES and "full-program" not in tags(cell):
        yield f"{lines} lines, more than {MOST_LINES}"
    try:
        # Magics and shell commands are not Python; nbval passes those that fail.
        compile(cell.source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        yield f"not plain Python: {error.msg}"
    if cell.source.rstrip().endswith(";"):
        yield "ends in a semicolon, which does not hide the value under nbval; assign it to _"
    if re.search(r"https?://", cell.source):
        yield "names a URL"
    if "sys.path" in cell.source:
        yield "edits sys.path"
    if "raises-exception" not in tags(cell) and _errors(cell):
        yield "stores an error without the tag raises-exception"
    for output in cell.outputs:
        yield from _output_problems(output, is_compared(cell))


def _output_problems(output: Any, compared: bool) -> Iterator[str]:
    if output.get("name") == "stderr":
        yield f"wrote to stderr: {output.text.strip()[:200]}"
    data = output.get("data", {})
    if data and not data.get("text/plain"):
        yield "an output has no text"
    for kind in filter(is_picture, data):
        told = output.metadata.get(kind, {}).get(ALT)
        if not is_sentence(told):
            yield f"a stored picture has no alternative text: {kind} has {told!r}, where a sentence must stand"
    if WIDGET_VIEW in data:
        yield "stores a widget view without its state, which shows as an error"
    drawn = {"image/svg+xml", "image/jpeg", "application/javascript"} & set(data)
    if (drawn or unsafe(joined(data.get("text/html", "")))) and "image/png" not in data:
        yield "an output has no PNG, so GitHub and an untrusted JupyterLab show nothing"
    for kind, text in texts(output):
        if is_picture(kind) or kind in (WIDGET_VIEW, "traceback"):
            continue
        for what, pattern in _UNSTABLE.items() if compared else ():
            if match := pattern.search(text):
                yield f"a compared output holds {what}: {match.group()!r}"


def _errors(cell: Any) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


def _first_line(cell: Any) -> str:
    return (cell.source.strip().splitlines() or ["empty"])[0][:60]
