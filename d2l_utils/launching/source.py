"""The script of a launch: a document with the torchrun command, the reader's function untouched, and three lines that run it."""

import ast
import builtins
import contextlib
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from d2l_utils.launching.code_comparison import functions_of
from d2l_utils.launching.definitions import (
    Definition,
    check_current,
    definition_of,
    has_definition,
    importable,
    scope_of,
)
from d2l_utils.launching.literals import literal
from d2l_utils.launching.names import FUTURE_ANNOTATIONS, global_names, in_order, needed_at_once

_ACCEPTED = "launch takes a function of an installed module, a function defined in a notebook cell or script, or the path of a script"

# What Python itself gives to the functions of a class: for `super()`, and from 3.14 on for the function of its annotations.
_OF_THE_CLASS = {"__class__", "__classdict__", "__conditional_annotations__"}


def script_for(function: Callable[..., Any], uses: Iterable[Any], arguments: dict[str, Any], command: str) -> str:
    """The text of the script that calls `function(**arguments)` on each rank.

    function: as `launch` accepts it. uses: functions and classes of the notebook that it names. arguments: literals and
    dataclasses. command: the torchrun command, shown in the docstring. TypeError says what is not accepted and why.
    """
    check_callable(function)
    check_arguments(function, arguments)
    uses = [uses] if callable(uses) or not isinstance(uses, Iterable) else list(uses)
    for helper in uses:
        if getattr(helper, "__name__", "") == "<lambda>":
            raise TypeError("uses has a lambda, which has no source of its own: write it as a def")
        if not has_definition(helper):
            raise TypeError(f"uses has {helper!r}: it takes functions and classes of the notebook")
    helpers: dict[str, Any] = {}
    for helper in [*uses, function]:
        if helpers.setdefault(helper.__name__, helper) is not helper:
            raise TypeError(f"uses: two different things are called {helper.__name__}, and a script can have one")
    imports: set[str] = set()
    with warnings.catch_warnings(action="ignore"):  # Python said them when the cell ran
        definitions = _definitions(function, helpers, imports)
        future_annotations = _future_annotations(definitions)
        parts = [
            "\n".join([definitions[name].text, *_restated(name, definitions[name], imports, helpers)])
            for name in in_order({n: d.text for n, d in definitions.items()}, future_annotations)
        ]
    values = {name: literal(value, imports, f"argument {name!r}", helpers) for name, value in arguments.items()}
    _check_bound_once(imports, definitions)
    call = ", ".join([function.__name__, *(f"{name}={text}" for name, text in values.items())])
    safe = command.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [
        f'"""{function.__name__} on every rank. Run it with:\n\n    {safe}\n"""',
        FUTURE_ANNOTATIONS.strip() if future_annotations else "",
        "\n".join(sorted(imports)),
        *parts,
    ]
    main = f'if __name__ == "__main__":\n    from d2l_utils.launching.worker import run_rank\n\n    run_rank({call})'
    return "\n\n\n".join(part for part in [*lines, main] if part) + "\n"


def _definitions(function: Any, helpers: dict[str, Any], imports: set[str]) -> dict[str, Definition]:
    """The texts that the script must have; what can be imported goes to `imports`."""
    definitions: dict[str, Definition] = {}
    for name, item in helpers.items():
        if importable(item):
            imports.add(f"from {item.__module__} import {name}")
            continue
        check_current(item)
        functions = functions_of(item) if isinstance(item, type) else [inspect.unwrap(item)]
        if any(set(each.__code__.co_freevars) - _OF_THE_CLASS for each in functions):
            raise TypeError(f"{name} is a closure: a script cannot have the variables that it keeps")
        definitions[name] = definition_of(item)
        resolve_globals(item, definitions[name], helpers, imports)
    return definitions


def _restated(name: str, definition: Definition, imports: set[str], helpers: Mapping[str, Any]) -> Iterator[str]:
    """Lines that give a definition the values which it computed in the notebook, such as a random default."""
    for attribute, value in definition.computed:
        with contextlib.suppress(TypeError):  # no literal: the rank computes it anew
            text = literal(value, imports, f"{attribute} of {name}", helpers)
            yield f"{name}.{attribute} = {text}  # as in the notebook"


def _future_annotations(definitions: dict[str, Definition]) -> bool:
    """Whether the script needs `from __future__ import annotations`, which holds for all of it or for nothing."""
    by_wish = {definition.future_annotations: name for name, definition in definitions.items()}
    if True in by_wish and False in by_wish:
        raise TypeError(
            f"{by_wish[False]} was defined without `from __future__ import annotations` and {by_wish[True]} with it, and a script can "
            "have one way: run the definitions of both again"
        )
    return True in by_wish


def _check_bound_once(imports: Collection[str], definitions: Collection[str]) -> None:
    bound = {"run_rank": "the last lines of the script"} | dict.fromkeys(definitions, "a definition of the notebook")
    for line in imports:
        name = line.split()[-1]
        if name in bound and line != "from d2l_utils.launching.worker import run_rank":
            raise TypeError(
                f"{name} would mean two things in the script ({bound[name]}, and {line}): rename one of them"
            )
        bound[name] = line
    if "run_rank" in definitions:
        raise TypeError("run_rank is what the script itself calls: give the notebook's function another name")


def encodable(path: str | os.PathLike[str]) -> str:
    """`path` as this Python can open it: one that took its locale for ASCII would stumble over Chinese in it."""
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


def check_keywords(function: Any, taken: Iterable[str]) -> None:
    """TypeError for a parameter that no argument can reach, because launch has a keyword of that name. taken: those keywords."""
    parameters = inspect.signature(function).parameters if isinstance(function, types.FunctionType) else {}
    for name, parameter in parameters.items():
        if name in taken and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{function.__name__} has a parameter {name!r}, and {name} is a keyword of launch itself, which would keep it: rename the "
                "parameter"
            )


def check_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """TypeError naming the argument when `function(**arguments)` could not be called."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"{function.__name__}{inspect.signature(function)} cannot be called with {sorted(arguments)}: {error}"
        ) from None


def resolve_globals(item: Any, definition: Definition, helpers: Mapping[str, Any], imports: set[str]) -> None:
    """Add the imports that the definition needs. TypeError names what the script could not know."""
    scope = scope_of(item)
    required = global_names(definition.text, bool(definition.future_annotations))
    at_once = needed_at_once(definition.text, bool(definition.future_annotations))
    for name in sorted(global_names(definition.text)):
        if name in helpers:
            if scope.get(name, helpers[name]) is not helpers[name]:
                raise TypeError(f"{item.__name__} names {name}, which the notebook has defined anew: pass the new one")
        elif _is_builtin(name, scope):
            continue
        elif name in scope and (line := _import_for(name, scope[name])):
            imports.update([line, *_submodules(definition.text, name, scope[name])])
        elif name not in required:
            continue  # in an annotation that nothing evaluates
        elif name in scope:
            raise TypeError(_why_unknown(item.__name__, name, scope[name]))
        elif hasattr(builtins, name):
            raise TypeError(_only_ipython(item.__name__, name))
        elif name in at_once:
            raise TypeError(
                f"{item.__name__} needs {name} where it is defined, and the notebook has no {name} any more: define it again"
            )
        # else it is unknown in the notebook too: the rank's own traceback tells


def _is_builtin(name: str, scope: Mapping[str, Any]) -> bool:
    """Whether plain Python gives this name its meaning, also where IPython has put something of its own in its place."""
    if name in ("__name__", "__builtins__", "__debug__"):
        return True
    builtin = getattr(builtins, name, None)
    python_has_it = name in ("exit", "quit") or (hasattr(builtins, name) and not _is_ipythons(builtin))
    return python_has_it and (name not in scope or scope[name] is builtin or _set_by_ipython(name, scope))


def _set_by_ipython(name: str, scope: Mapping[str, Any]) -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    hidden = getattr(shell, "user_ns_hidden", {})
    return name in hidden and hidden[name] is scope[name]


def _is_ipythons(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "IPython"


def _import_for(name: str, value: Any) -> str | None:
    """The import statement that gives `value` this name in a rank; None where there is none."""
    if isinstance(value, types.ModuleType):
        if getattr(sys.modules.get(value.__name__.partition(".")[0]), "__spec__", None) is None:
            return None  # made by hand, or the notebook itself
        return f"import {name}" if value.__name__ == name else _import_as(value, name)
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__":
        return None
    loaded, own = sys.modules.get(module), str(getattr(value, "__name__", name))
    if getattr(loaded, "__spec__", None) is None:
        return None
    if getattr(loaded, name, None) is value:
        return f"from {module} import {name}"
    if getattr(loaded, own, None) is value or (has_definition(value) and importable(value)):
        return f"from {module} import {own}" + ("" if own == name else f" as {name}")
    return None


def _submodules(text: str, name: str, value: Any) -> Iterator[str]:
    """Imports of the submodules that the text reads as `package.part`, where `import package.part` gave the notebook its name."""
    for node in ast.walk(ast.parse(text)) if isinstance(value, types.ModuleType) and value.__name__ == name else ():
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path.startswith(f"{name}.") and isinstance(sys.modules.get(path), types.ModuleType):
                yield f"import {path}"


def _why_unknown(user: str, name: str, value: Any) -> str:
    if _set_by_ipython(name, {name: value}) or _is_ipythons(value):
        return _only_ipython(user, name)
    if isinstance(value, types.ModuleType):
        return f"{user} names {name}, the module {value.__name__!r}, which a rank cannot import"
    if not has_definition(value):
        return f"{user} reads the notebook's variable {name!r}: pass it as a keyword argument instead, or make it inside {user}"
    check_current(value)
    if value.__name__ == "<lambda>":
        return f"{user} names {name}, a lambda, which has no source of its own: write it as a def"
    if value.__name__ != name:
        return f"{user} names {name}, which was defined as {value.__name__}: name it so there, and in uses"
    return f"{user} names {name}, which is defined in the notebook: pass uses=[{name}] so that the script has it"


def _only_ipython(user: str, name: str) -> str:
    return (
        f"{user} names {name}, which only IPython has (lines with ! and % need it too): a rank is plain Python. Import what it "
        f"needs inside {user}, or pass the value as a keyword argument"
    )


def _import_as(module: types.ModuleType, name: str) -> str:
    parent, _, last = module.__name__.rpartition(".")
    if parent and last == name:
        return f"from {parent} import {name}"
    return f"import {module.__name__} as {name}"
