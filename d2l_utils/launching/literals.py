"""Arguments of a launch as they stand in its script: Python that a reader can read."""

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from d2l_utils.launching.definitions import check_current, importable


def literal(value: Any, imports: set[str], what: str, helpers: Mapping[str, Any] | None = None, depth: int = 0) -> str:
    """Python source for `value`. TypeError names the argument when there is none that a reader could read.

    helpers: the notebook's classes that the script has, by name.
    """

    def inner(part: Any) -> str:
        return literal(part, imports, what, helpers, depth + 1)

    if depth > 50:
        raise TypeError(f"{what} holds itself, or is nested more than 50 deep: it cannot be written into a script")
    value = python_value(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) in (list, tuple):
        items = [inner(item) for item in value]
        if type(value) is tuple:
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        return f"[{', '.join(items)}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
    kind = type(value)
    if is_dataclass(value) and not isinstance(value, type):
        shipped = (helpers or {}).get(kind.__name__)
        if shipped is kind or importable(kind):
            if shipped is not kind:
                imports.add(f"from {kind.__module__} import {kind.__name__}")
            texts = [f"{f.name}={inner(getattr(value, f.name))}" for f in fields(value) if f.init]
            return f"{kind.__name__}({', '.join(texts)})"
        if shipped is not None:
            raise TypeError(
                f"{what} is a {kind.__name__} of an earlier definition: make it again with the {kind.__name__} of now"
            )
        check_current(kind)
        raise TypeError(
            f"{what} is a {kind.__name__}, which is defined in the notebook: pass uses=[{kind.__name__}] so that the script has it"
        )
    raise TypeError(
        f"{what} is a {kind.__qualname__}: it must be written into a script, so numbers, strings, lists, tuples, dicts and "
        "dataclasses of a module are allowed"
    )


def python_value(value: Any) -> Any:
    """A numpy scalar as the Python number, string or bytes that it holds; anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.number | numpy.bool_ | numpy.str_ | numpy.bytes_):
        return value.item()
    return value
