"""Real code of this package, shown in a lesson: whole, or as the difference of two pieces."""

from __future__ import annotations

import difflib
import inspect
from typing import Any


def source(item: Any) -> str:
    """The source of a module, class or function, without the blank lines around it."""
    return inspect.getsource(item).strip("\n")


def diff(one: Any, other: Any) -> str:
    """What turns the source of ``one`` into that of ``other``: lines with - go, lines with + come. Two lines of context."""
    lines = difflib.unified_diff(source(one).splitlines(), source(other).splitlines(), lineterm="", n=2)
    return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))
