"""The text of a function or class that a cell or script defined, and the proof that it is the reader's own.

A text is found by name or by line, and either may lead to another text: a cell was run again, a file was edited, a cell magic ran
the text, two branches of an `if` have one name. So what is found is compiled and compared with what the reader has.
"""

import __future__

import ast
import functools
import inspect
import io
import linecache
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from d2l_utils.launching.code_comparison import (
    annotations_of,
    class_difference,
    code_key,
    computed_values,
    function_difference,
    functions_of,
    inner_codes,
    same_definition,
)

_FLAG = __future__.annotations.compiler_flag
_NO_MATCH = ("its code is another", "it stands where nothing runs", "it does not compile")
_ADVICE = "Run its definition again, in a cell without a cell magic"


@dataclass(frozen=True)
class Definition:
    """text: as it can stand in a script. future_annotations: whether `from __future__ import annotations` held where it was
    defined; None where that makes no difference. computed: attributes and values of `code_comparison.computed_values`."""

    text: str
    future_annotations: bool | None
    computed: tuple[tuple[str, Any], ...] = ()


def definition_of(item: Any) -> Definition:
    """The text of a function or class. TypeError where none is found that compiles to what `item` is now."""
    live = inspect.unwrap(item)
    wrappers = _wrappers(item)
    differences: list[str] = []
    for text in _texts(live):
        fitting: dict[str, Definition] = {}
        tree = _parsed(text)
        for node, statement in _nodes(tree, live):
            computed = tuple(computed_values(live, node, scope_of(live)))
            definition = Definition(_cut(text, node), _future_annotations(live, node), computed)
            # IPython compiles a cell statement by statement, and that can give other code: how a call is made depends on whether
            # its module was imported in the same text.
            difference = _difference(live, node, text, statement) and _difference(live, node, text, None)
            if difference is None and len(wrappers) > len(node.decorator_list):
                difference = "it was wrapped after it was defined"
            if difference is None and _first_line(node) == _live_line(live):
                return definition
            if difference is None:
                fitting[ast.dump(node)] = definition
            else:
                differences.append(difference)
                if not difference.startswith(_NO_MATCH) and _first_line(node) == _live_line(live):
                    raise _changed(live, difference)  # an older cell whose values cannot be compared would seem to fit
        if len(fitting) > 1:
            raise TypeError(
                f"{len(fitting)} definitions of {live.__name__} in one cell look alike, and nothing tells which of them ran. "
                "Give each a name of its own"
            )
        if fitting:
            return fitting.popitem()[1]
    if differences:
        raise _changed(live, differences[0])
    raise TypeError(
        f"the source of {live.__name__} cannot be found; exec, a prompt and some cell magics keep none. {_ADVICE}"
    )


def _changed(live: Any, difference: str) -> TypeError:
    return TypeError(
        f"the text that was found for {live.__name__} is not the {live.__name__} that the notebook has: {difference}. "
        f"The text was changed after it ran, or {live.__name__} after it was defined. {_ADVICE}"
    )


def importable(item: Any) -> bool:
    """Whether a rank can import this very object, or one of the same text, by its module and name."""
    if item.__module__ in ("__main__", None) or "<locals>" in item.__qualname__:
        return False
    module = sys.modules.get(item.__module__)
    found = getattr(module, item.__name__, None)
    # `%autoreload` gives the old function the new code
    return getattr(module, "__file__", None) is not None and (found is item or same_definition(found, item))


def check_current(item: Any) -> None:
    """TypeError for what a module had under this name before it was reloaded: the ranks would import what it has now."""
    module = sys.modules.get(item.__module__)
    if item.__module__ != "__main__" and "." not in item.__qualname__ and getattr(module, "__file__", None) is not None:
        raise TypeError(
            f"{item.__name__} is not the {item.__name__} that {item.__module__} has now: the module was reloaded, or the name was given to "
            f"something else. Import {item.__name__} again"
        )


def has_definition(value: Any) -> bool:
    """Whether a `def` or `class` made it, also under a decorator such as functools.cache that keeps what it wraps."""
    return isinstance(value, type | types.FunctionType) or isinstance(
        inspect.getattr_static(value, "__wrapped__", None), types.FunctionType
    )


def scope_of(item: Any) -> dict[str, Any]:
    """The global names of a function or class; of a decorated function its own, and not its wrapper's."""
    for function in functions_of(item) if isinstance(item, type) else [inspect.unwrap(item)]:
        return function.__globals__
    return vars(sys.modules[item.__module__]) if item.__module__ in sys.modules else {}


def _live_line(item: Any) -> int | None:
    """The line where its definition begins. A class keeps it from Python 3.13 on."""
    line: int | None = (
        getattr(item, "__firstlineno__", None) if isinstance(item, type) else item.__code__.co_firstlineno
    )
    return line


def _texts(item: Any) -> Iterator[str]:
    """Texts in which its definition may stand, the likeliest first."""
    functions = functions_of(item) if isinstance(item, type) else [item]
    files = {function.__code__.co_filename: function.__globals__ for function in functions}
    module = sys.modules.get(item.__module__)
    if isinstance(item, type) and getattr(module, "__file__", None):
        files.setdefault(str(vars(module)["__file__"]), vars(module))
    for file, scope in files.items():
        linecache.checkcache(file)
        yield "".join(linecache.getlines(file, scope))
    cells = getattr(sys.modules.get("__main__"), "In", None)  # IPython's, unless the reader has a variable of that name
    for cell in reversed(cells if isinstance(cells, list) else []):
        if isinstance(cell, str) and item.__name__ in cell:
            yield cell
            yield from _inner_texts(cell, item.__name__)
    for entry in reversed(list(linecache.cache.values())):  # cells that IPython does not count
        if len(entry) == 4 and entry[1] is None and any(item.__name__ in line for line in entry[2]):
            yield "".join(entry[2])


def _inner_texts(cell: str, name: str) -> Iterator[str]:
    """Texts in the cell's strings: what it gave to a cell magic, to `run_cell` or to `exec`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    for node in ast.walk(_parsed(cell)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name in node.value:
            try:
                text = node.value if shell is None else shell.transform_cell(node.value)
            except (SyntaxError, UnicodeError):  # words, and no code
                continue
            yield text
            if text != cell:
                yield from _inner_texts(text, name)


@functools.lru_cache(64)  # a launch is repeated, with the same helpers of the same cell
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _nodes(tree: ast.Module, item: Any) -> list[tuple[Any, ast.stmt]]:
    """The definitions that have the item's qualified name, each with the statement of the text in which it stands."""
    found: list[tuple[Any, ast.stmt]] = []
    kinds = (ast.ClassDef,) if isinstance(item, type) else (ast.FunctionDef, ast.AsyncFunctionDef)

    def look(node: ast.AST, above: str, statement: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            above += node.name
            if (above, node.name) == (item.__qualname__, item.__name__) and isinstance(node, kinds):
                found.append((node, statement))
            above += "." if isinstance(node, ast.ClassDef) else ".<locals>."
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                look(child, above, statement)

    for statement in tree.body:
        look(statement, "", statement)
    return found


def _first_line(node: Any) -> int:
    return int(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))


def _cut(text: str, node: Any) -> str:
    """The definition's lines, untouched: to shift an indented definition would change the strings in it."""
    lines = list(io.StringIO(text, newline=None))  # as Python counts them: str.splitlines knows more ends of lines
    cut = "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip("\n")
    before = cut[: len(cut) - len(cut.lstrip(" \t\f"))]
    return f"if True:\n{cut}" if before.rpartition("\f")[2] else cut  # a form feed begins the line anew


def _future_annotations(item: Any, node: Any) -> bool | None:
    parts = list(ast.walk(node))
    if not any(getattr(part, "annotation", None) or getattr(part, "returns", None) for part in parts):
        return None
    for function in functions_of(item) if isinstance(item, type) else [item]:
        return bool(function.__code__.co_flags & _FLAG)
    values = annotations_of(item) or {}
    for part in node.body:  # a class that keeps no code: with the import, what the text does not quote is text
        if isinstance(part, ast.AnnAssign) and not isinstance(part.annotation, ast.Constant):
            return isinstance(values.get(getattr(part.target, "id", "")), str | typing.ForwardRef)
    return None


def _difference(item: Any, node: Any, text: str, statement: ast.stmt | None) -> str | None:
    """Compile the text, or one statement of it, and compare what stands at `node`. None, or what differs in words."""
    functions = functions_of(item) if isinstance(item, type) else [item]
    try:
        whole = _compiled(text, statement, functions[0].__code__.co_flags & _FLAG if functions else 0)
    except SyntaxError as error:
        return f"it does not compile ({error.msg})"
    name, line = item.__qualname__, _first_line(node)
    code = next((c for c in inner_codes(whole) if c.co_qualname == name and c.co_firstlineno == line), None)
    if code is None:
        return "it stands where nothing runs"
    compare = class_difference if isinstance(item, type) else function_difference
    return compare(item, node, code, scope_of(item))


@functools.lru_cache(64)
def _compiled(text: str, statement: ast.stmt | None, flags: int) -> types.CodeType:
    unit = ast.Module([statement], []) if statement else _parsed(text)
    return compile(unit, "<definition>", "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _wrappers(item: Any) -> list[Any]:
    """What decorators have put around a function. TypeError where one of the notebook's was defined anew since."""
    wrappers: list[Any] = []
    scope = scope_of(item)
    while hasattr(item, "__wrapped__") and not isinstance(item, type):
        wrappers.append(item)
        code: Any = getattr(item, "__code__", None)
        name = code.co_qualname.partition(".")[0] if code else ""
        maker = scope.get(name) if getattr(item, "__globals__", None) is scope else None
        if isinstance(maker, types.FunctionType) and code_key(code) not in map(code_key, inner_codes(maker.__code__)):
            raise TypeError(
                f"{item.__name__} is decorated by {name}, which the notebook has defined anew: run the definition of {item.__name__} again"
            )
        item = item.__wrapped__
    return wrappers
