"""The script of a launch: a document with the torchrun command, the reader's function untouched, and three lines that run it."""

import ast
import importlib
import inspect
import linecache
import math
import os
import symtable
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

_ACCEPTED = "launch takes a function of an installed module, a function defined in a notebook cell or script, or the path of a script"


def script_for(function: Callable[..., Any], uses: Iterable[Any], arguments: dict[str, Any], command: str) -> str:
    """The text of the script that calls `function(**arguments)` on each rank.

    function: as `launch` accepts it. uses: functions and classes of the notebook that it names. arguments: literals and
    dataclasses. command: the torchrun command, shown in the docstring. TypeError says what is not accepted and why.
    """
    check_callable(function)
    check_arguments(function, arguments)
    uses = [uses] if callable(uses) or not isinstance(uses, Iterable) else list(uses)
    for helper in uses:
        if not isinstance(helper, type | types.FunctionType):
            raise TypeError(f"uses has {helper!r}: it takes functions and classes of the notebook")
    imports: set[str] = set()
    values = {name: literal(value, imports, f"argument {name!r}") for name, value in arguments.items()}
    parts: list[str] = []
    if importable(function):
        imports.add(f"from {function.__module__} import {function.__name__}")
    else:
        helpers: dict[str, Any] = {}
        for helper in [*uses, function]:
            if helpers.setdefault(helper.__name__, helper) is not helper:
                raise TypeError(f"uses: two different things are called {helper.__name__}, and a script can have one")
        texts: dict[str, str] = {}
        for item in helpers.values():
            if item is not function and importable(item):
                imports.add(f"from {item.__module__} import {item.__name__}")
                continue
            texts[item.__name__] = source_of(item)
            resolve_globals(item, texts[item.__name__], helpers, imports)
        parts = [texts[name] for name in in_order(texts)]
    call = ", ".join([function.__name__, *(f"{name}={text}" for name, text in values.items())])
    safe = command.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [
        f'"""{function.__name__} on every rank. Run it with:\n\n    {safe}\n"""',
        "\n".join(sorted(imports)),
        *parts,
    ]
    main = f'if __name__ == "__main__":\n    from d2l_utils.launching.worker import run_rank\n\n    run_rank({call})'
    return "\n\n\n".join(part for part in [*lines, main] if part) + "\n"


def encodable(path: str | os.PathLike[str]) -> str:
    """`path` as this Python can open it: one that took its locale for ASCII would stumble over Chinese in it (L26)."""
    text = os.fspath(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def check_callable(function: Any) -> None:
    """TypeError unless `function` is a plain function whose source stands on its own."""
    name = getattr(function, "__name__", repr(function))
    if not isinstance(function, types.FunctionType):
        raise TypeError(
            f"{_ACCEPTED}; got {function!r}, of type {type(function).__name__} (pass the function itself, not what it returns)"
        )
    if name == "<lambda>":
        raise TypeError(f"{_ACCEPTED}; got a lambda, which has no source of its own: write it as a def")
    if hasattr(function, "__wrapped__"):
        raise TypeError(f"{_ACCEPTED}; {name} is wrapped by a decorator: use the decorator inside the function")
    if function.__code__.co_freevars:
        names = ", ".join(function.__code__.co_freevars)
        raise TypeError(f"{_ACCEPTED}; {name} is a closure over {names}: pass them as keyword arguments instead")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise TypeError(f"{_ACCEPTED}; {name} is a generator or coroutine: a rank must return its result")


def check_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """TypeError naming the argument when `function(**arguments)` could not be called."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"{function.__name__}{inspect.signature(function)} cannot be called with {sorted(arguments)}: {error}"
        ) from None


def importable(item: Any) -> bool:
    """Whether a rank can import this very object by its module and name."""
    if item.__module__ in ("__main__", None) or "<locals>" in item.__qualname__:
        return False
    module = sys.modules.get(item.__module__)
    return getattr(module, item.__name__, None) is item and getattr(module, "__file__", None) is not None


def literal(value: Any, imports: set[str], what: str) -> str:
    """Python source for `value`. TypeError names the argument when there is none that a reader could read."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) in (list, tuple):
        items = [literal(item, imports, what) for item in value]
        if type(value) is tuple:
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        return f"[{', '.join(items)}]"
    if type(value) is dict:
        return (
            "{" + ", ".join(f"{literal(k, imports, what)}: {literal(v, imports, what)}" for k, v in value.items()) + "}"
        )
    if is_dataclass(value) and not isinstance(value, type) and importable(type(value)):
        imports.add(f"from {type(value).__module__} import {type(value).__name__}")
        inner = [f"{f.name}={literal(getattr(value, f.name), imports, what)}" for f in fields(value) if f.init]
        return f"{type(value).__name__}({', '.join(inner)})"
    raise TypeError(
        f"{what} is a {type(value).__qualname__}: it must be written into a script, so numbers, strings, lists, tuples, dicts and "
        "dataclasses of a module are allowed"
    )


def source_of(item: Any) -> str:
    """The current source of a function or class that was defined in a cell or script."""
    try:
        text = _class_source(item) if isinstance(item, type) else inspect.getsource(item)
    except (OSError, TypeError) as error:
        raise TypeError(f"{_ACCEPTED}; the source of {item.__name__} cannot be found ({error})") from None
    # Untouched: to shift an indented definition would change the strings in it.
    text = text.rstrip("\n")
    return f"if True:\n{text}" if text[:1].isspace() else text


def _class_source(item: type) -> str:
    """inspect cannot find a class of `__main__` in every Python: look where its methods are, then through the cells that ran."""
    files = [f.__code__.co_filename for f in vars(item).values() if isinstance(f, types.FunctionType)]
    texts = ["".join(linecache.getlines(file)) for file in files]
    texts += reversed(getattr(sys.modules.get("__main__"), "In", []))
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == item.__name__]
        if found:
            first = min([found[-1].lineno, *(decorator.lineno for decorator in found[-1].decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : found[-1].end_lineno])
    return inspect.getsource(item)


def global_names(text: str) -> set[str]:
    """Names that the definition in `text` reads from outside itself."""
    names: set[str] = set()

    def walk(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                names.add(symbol.get_name())
        for child in table.get_children():
            walk(child, False)

    walk(symtable.symtable(text, "<cell>", "exec"), True)
    return names


def in_order(texts: dict[str, str]) -> list[str]:
    """The names in the order given, save that what a definition needs at once comes before it.

    A function's body may name what follows; its decorators, defaults and annotations, and a class's bases and body may not.
    They may call what they name, so whatever that names comes before too, unless it needs this very definition at once.
    """
    at_once = {name: needed_at_once(text) & texts.keys() for name, text in texts.items()}
    named = {name: global_names(text) & texts.keys() for name, text in texts.items()}
    placed: dict[str, None] = {}

    def place(name: str, above: tuple[str, ...]) -> None:
        first, below = at_once[name], {name, *above}
        called = {other for other in reached(first, named) if not below & reached({other}, at_once)}
        for other in [*filter(first.__contains__, texts), *filter(called.__contains__, texts)]:
            if other not in below and other not in placed:
                place(other, (*above, name))
        placed.setdefault(name)

    for name in texts:
        place(name, ())
    return list(placed)


def reached(names: set[str], links: dict[str, set[str]]) -> set[str]:
    """`names`, and all to which links lead from them."""
    found, todo = set(names), list(names)
    while todo:
        new = links[todo.pop()] - found
        found |= new
        todo += new
    return found


def needed_at_once(text: str) -> set[str]:
    """Names that the definition in `text` reads as soon as it is executed, before anything is called."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            todo += [child for child in ast.iter_child_nodes(node) if child not in body]
        else:
            todo += ast.iter_child_nodes(node)
    return names


def resolve_globals(item: Any, text: str, helpers: dict[str, Any], imports: set[str]) -> None:
    """Add the imports that the definition needs. TypeError names what the script could not know."""
    scope = vars(sys.modules[item.__module__]) if isinstance(item, type) else item.__globals__
    for name in sorted(global_names(text) - {item.__name__}):
        if name not in scope:
            continue  # a builtin, or a name that is wrong in the notebook too: the rank's own traceback tells
        value = scope[name]
        if name in helpers:
            if value is not helpers[name]:
                raise TypeError(f"{item.__name__} names {name}, which the notebook has defined anew: pass the new one")
            continue
        if isinstance(value, types.ModuleType):
            imports.add(f"import {value.__name__}" if value.__name__ == name else _import_as(value, name))
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and importable(value):
            alias = "" if value.__name__ == name else f" as {name}"
            imports.add(f"from {value.__module__} import {value.__name__}{alias}")
        elif isinstance(value, type | types.FunctionType):
            if value.__name__ != name:
                raise TypeError(
                    f"{item.__name__} names {name}, which was defined as {value.__name__}: name it so there, and in uses"
                )
            raise TypeError(
                f"{item.__name__} names {name}, which is defined in the notebook: pass uses=[{name}] so that the script has it"
            )
        elif getattr(value, "__module__", None) and _reexported(value, name):
            imports.add(f"from {value.__module__} import {name}")
        else:
            raise TypeError(
                f"{item.__name__} reads the notebook's variable {name!r}: pass it as a keyword argument instead"
            )


def _import_as(module: types.ModuleType, name: str) -> str:
    parent, _, last = module.__name__.rpartition(".")
    if parent and last == name:
        return f"from {parent} import {name}"
    return f"import {module.__name__} as {name}"


def _reexported(value: Any, name: str) -> bool:
    try:
        return getattr(importlib.import_module(value.__module__), name, None) is value
    except (ImportError, TypeError, AttributeError):
        return False
