"""Real code of this package, shown in a lesson: whole, or as the difference of two pieces."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from typing import Any


def source(item: Any) -> str:
    """The source of a module, class, function or method, without the blank lines around it."""
    return textwrap.dedent(inspect.getsource(item)).strip("\n")


def diff(one: Any, other: Any) -> str:
    """What turns the code of ``one`` into that of ``other``: lines with - go, lines with + come. Two lines of context;
    docstrings are left out."""
    lines = difflib.unified_diff(_code(one), _code(other), lineterm="", n=2)
    return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def _code(item: Any) -> list[str]:
    """The lines of the source without docstrings, and without the blank lines after them."""
    lines: list[str | None] = list(source(item).splitlines())
    for node in ast.walk(ast.parse(source(item))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            end = first.end_lineno or first.lineno
            while end < len(lines) and not lines[end]:
                end += 1
            lines[first.lineno - 1 : end] = [None] * (end - first.lineno + 1)
    return [line for line in lines if line is not None]
