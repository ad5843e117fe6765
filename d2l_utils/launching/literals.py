"""Arguments of a launch as they stand in its script: Python that a reader can read."""

import copy
import functools
import inspect
import math
import reprlib
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
            _check_made_again(value, what)
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


def _check_made_again(value: Any, what: str) -> None:
    """TypeError where the constructor would make another object of the fields: it changes what it is given, or has not set everything."""
    kind, names = type(value), [f.name for f in fields(value)]
    had = {name: getattr(value, name) for name in [*names, *getattr(value, "__dict__", {})] if hasattr(value, name)}
    if not hasattr(kind, "__post_init__") and had.keys() == {f.name for f in fields(value) if f.init}:
        return
    advice = f"make the {kind.__name__} inside the function, of arguments that can be passed"
    try:
        made = kind(**copy.deepcopy({f.name: had[f.name] for f in fields(value) if f.init}))
    except Exception as error:
        raise TypeError(
            f"{what} is a {kind.__name__} that cannot be made again of its fields ({error}): {advice}"
        ) from None
    for name, own in had.items():
        if isinstance(inspect.getattr_static(kind, name, None), functools.cached_property):
            continue
        if not hasattr(made, name):
            raise TypeError(
                f"{what} has {name}, which was added to it and which no {kind.__name__} of a rank would have: {advice}"
            )
        if not _same(own, getattr(made, name)):
            raise TypeError(
                f"{what} is a {kind.__name__} whose {name} is {reprlib.repr(own)}; made again of its fields it would be "
                f"{reprlib.repr(getattr(made, name))}: {advice}"
            )


def _same(one: Any, other: Any) -> bool:
    """Whether two values are alike, as far as their own comparison can tell."""
    if type(one) is not type(other):
        return False
    try:
        return repr(one) == repr(other) or bool(one == other)
    except Exception:  # an array of several truths
        return True


def python_value(value: Any) -> Any:
    """A numpy scalar as the Python number, string or bytes that it holds; anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.number | numpy.bool_ | numpy.str_ | numpy.bytes_):
        return value.item()
    return value
