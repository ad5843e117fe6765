"""Whether a function or class is what a text would define: its code, its defaults, and what a class's body sets.

Each comparison gives None, or in words the first thing that differs.
"""

import abc
import ast
import builtins
import contextlib
import dataclasses
import dis
import enum
import functools
import inspect
import reprlib
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Scope = Mapping[str, Any]
_PLAIN_DATA = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_UNKNOWN = object()
_PURE = {kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, tuple, list, dict, set, frozenset)}


def function_difference(function: Any, node: Any, code: types.CodeType, scope: Scope) -> str | None:
    """Compare a function with its text: `node`, which was compiled to `code`."""
    if code_key(function.__code__) != code_key(code):
        return "its code is another"
    if vars(function) and not node.decorator_list:
        return f"{next(iter(vars(function)))} was added to it"
    return _defaults_difference(function, node, scope)


def class_difference(cls: type, node: ast.ClassDef, body: types.CodeType, scope: Scope) -> str | None:
    """Compare a class with its text: `node`, whose body was compiled to `body`. A value that the body computes by a call cannot be
    compared."""
    return next(_class_differences(cls, node, body, scope), None)


def computed_values(live: Any, node: Any, scope: Scope) -> Iterator[tuple[str, Any]]:
    """(attribute, value) of the plain data that a call computed when the definition ran: in a rank it may compute other data.

    Of a function its defaults, of a class what its body sets. What a decorator or a metaclass may have made is left to them.
    """
    if node.decorator_list or (isinstance(live, type) and type(live) not in (type, abc.ABCMeta)):
        return
    if isinstance(live, type):
        stored = Counter(s.targets[0].id for s in node.body if isinstance(s, ast.Assign) and _is_name(s.targets[0]))  # type: ignore[attr-defined]
        for name, statement in _set_once(node, stored):
            computed = isinstance(statement, ast.Assign) and _value_of(statement.value, scope, stored) is _UNKNOWN
            if computed and isinstance(vars(live).get(name), _PLAIN_DATA):
                yield name, vars(live)[name]
        return
    texts, values = _defaults(live, node)
    computed = any(_value_of(text, scope) is _UNKNOWN for text in texts.values())
    if computed and all(isinstance(value, _PLAIN_DATA) for value in values.values()):
        yield from ((n, v) for n in ("__defaults__", "__kwdefaults__") if (v := getattr(live, n)))


def same_definition(one: Any, other: Any) -> bool:
    """Whether two functions or two classes have the same code and the same plain data, as after a reload that changed nothing."""
    if isinstance(one, type) and isinstance(other, type):
        data = [
            {n: repr(v) for n, v in vars(c).items() if isinstance(v, _PLAIN_DATA) and n[:2] != "__"}
            for c in (one, other)
        ]
        codes = [[code_key(function.__code__) for function in functions_of(cls)] for cls in (one, other)]
        return data[0] == data[1] and codes[0] == codes[1]
    one, other = inspect.unwrap(one), inspect.unwrap(other)
    if not isinstance(one, types.FunctionType) or not isinstance(other, types.FunctionType) or one.__closure__:
        return False
    defaults = [(repr(f.__defaults__), repr(f.__kwdefaults__)) for f in (one, other)]
    return code_key(one.__code__) == code_key(other.__code__) and defaults[0] == defaults[1]


def functions_of(cls: type) -> list[types.FunctionType]:
    """The functions that the body of the class defines, also inside staticmethod, property and decorators that name what they wrap."""
    found = [function for value in vars(cls).values() for function in _functions(value)]
    return [function for function in found if function.__code__.co_qualname.startswith(f"{cls.__qualname__}.")]


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """All code inside `code`, however deep."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from inner_codes(constant)


def code_key(code: types.CodeType) -> tuple[Any, ...]:
    """What makes two codes the same, wherever they stand: all but file and lines."""
    return (
        code.co_qualname,
        code.co_code,
        code.co_exceptiontable,
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        code.co_flags,
        *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        tuple(_constant_key(constant) for constant in code.co_consts),
    )


def _constant_key(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return code_key(value)
    if isinstance(value, frozenset):
        return frozenset(_constant_key(part) for part in value)
    return type(value), repr(value)  # 1, 1.0 and True are equal, and are not the same constant


def _functions(value: Any) -> Iterator[types.FunctionType]:
    parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    part: Any
    for part in parts:
        if isinstance(part, functools.cached_property | functools.partialmethod):
            part = part.func
        with contextlib.suppress(ValueError):
            part = inspect.unwrap(part)
        if isinstance(part, types.FunctionType):
            yield part


def _defaults(function: Any, node: Any) -> tuple[dict[str, ast.expr], dict[str, Any]]:
    """Texts and values of the parameters' defaults, by name."""
    arguments, code = node.args, function.__code__
    places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    texts = dict(zip(reversed(places), reversed(arguments.defaults), strict=False))
    texts |= {a.arg: text for a, text in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if text}
    live = dict(zip(reversed(places[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False))
    return texts, live | (function.__kwdefaults__ or {})


def _defaults_difference(function: Any, node: Any, scope: Scope, local: Collection[str] = ()) -> str | None:
    texts, live = _defaults(function, node)
    if live.keys() != texts.keys():
        return "other parameters have a default"
    differences = (_value_difference(f"the default of {n}", live[n], texts[n], scope, local) for n in live)
    return next(filter(None, differences), None)


def _class_differences(cls: type, node: ast.ClassDef, body: types.CodeType, scope: Scope) -> Iterator[str]:
    own, inner = vars(cls), list(inner_codes(body))
    keys = {code_key(code) for code in inner}
    for function in functions_of(cls):
        if code_key(function.__code__) not in keys:
            yield f"its {function.__name__} is another"
    yield from _base_differences(cls, node, scope)
    stored = Counter(i.argval for i in dis.get_instructions(body) if i.opname == "STORE_NAME")
    is_enum = isinstance(cls, enum.EnumMeta)  # which makes numbers of the members' own type: 1.0 of 1
    plain = type(cls) in (type, abc.ABCMeta) and not node.decorator_list and "_field_defaults" not in own
    for name, statement in _set_once(node, stored):
        if name not in own and plain:
            yield f"it has no {name} any more"
        elif isinstance(statement, ast.ClassDef):
            if not statement.decorator_list:
                code = next((c for c in inner if c.co_qualname == f"{body.co_qualname}.{statement.name}"), None)
                value = own.get(name)
                different = not isinstance(value, type) or not code or class_difference(value, statement, code, scope)
                yield from [f"its {name} is another"] * bool(different)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _method_differences(cls, name, statement, scope, stored)
        elif not _has_own_constructor(cls, body):
            for value in _values(cls, name):
                difference = _value_difference(name, value, statement.value, scope, stored)
                if difference and not (is_enum and value == _value_of(statement.value, scope, stored)):
                    yield difference
    yield from _field_differences(cls, node)
    if (
        plain
        and isinstance(cls.__init_subclass__, types.BuiltinMethodType)
        and not {"vars", "locals"} & {*body.co_names}
    ):
        for name, value in own.items():
            ours = isinstance(value, (*_PLAIN_DATA, type)) or any(f.__globals__ is scope for f in _functions(value))
            if ours and not name.startswith("__") and name not in body.co_names:
                yield f"{name} was added to it"


def _set_once(node: ast.ClassDef, stored: Counter[str]) -> Iterator[tuple[str, Any]]:
    """The names that the body sets once and in any case, each with its statement."""
    for statement in node.body:
        name = getattr(statement, "name", None)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            name = getattr(statement.targets[0], "id", None)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            name = getattr(statement.target, "id", None)
        if name and stored[mangled := _mangled(node.name, name)] == 1:
            yield mangled, statement


def _mangled(class_name: str, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__") and class_name.strip("_")
    return f"_{class_name.lstrip('_')}{name}" if private else name


def _method_differences(cls: type, name: str, node: Any, scope: Scope, stored: Collection[str]) -> Iterator[str]:
    """A method that was replaced after the class was defined has another qualified name. What decorators make is theirs."""
    qualname = f"{cls.__qualname__}.{node.name}"
    functions = [f for f in _functions(vars(cls).get(name)) if f.__code__.co_qualname == qualname]
    known = all(getattr(d, "id", None) in ("staticmethod", "classmethod", "property") for d in node.decorator_list)
    if known and not functions:
        yield f"its {name} is another"
    for function in functions:
        if difference := _defaults_difference(function, node, scope, stored):
            yield f"in its {name} {difference}"


def _base_differences(cls: type, node: ast.ClassDef, scope: Scope) -> Iterator[str]:
    bases = vars(cls).get("__orig_bases__", cls.__bases__)
    written = len(node.bases) + ("__orig_bases__" in vars(cls) and bool(node.type_params))
    allowed = {0, 1} if bases == (object,) else {len(bases)}
    if written not in allowed and not any(isinstance(base, ast.Starred) for base in node.bases):
        yield "it has other bases"
    metaclass = [keyword.value for keyword in node.keywords if keyword.arg == "metaclass"]
    for base, text in [*zip(bases, node.bases, strict=False), *((type(cls), text) for text in metaclass)]:
        found = _value_of(text, scope) if isinstance(text, ast.Name | ast.Attribute) else _UNKNOWN
        derived = text in metaclass and isinstance(found, type) and issubclass(type(cls), found)
        if found is not _UNKNOWN and found is not base and not derived:
            yield f"its base {ast.unparse(text)} was defined anew"


def _field_differences(cls: type, node: ast.ClassDef) -> Iterator[str]:
    live = annotations_of(cls)
    texts = [_mangled(node.name, s.target.id) for s in node.body if isinstance(s, ast.AnnAssign) and _is_name(s.target)]  # type: ignore[union-attr]
    branches = any(isinstance(s, ast.If | ast.For | ast.While | ast.Try | ast.With) for s in node.body)
    if live is not None and not branches and set(texts) != live.keys():
        yield f"its fields are {', '.join(live) or 'none'}"


def annotations_of(cls: type) -> dict[str, Any] | None:
    """The class's own annotations; None where they cannot be evaluated."""
    try:
        return dict(inspect.get_annotations(cls))
    except Exception:  # from Python 3.14 on they are evaluated only now
        return None


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def _has_own_constructor(cls: type, body: types.CodeType) -> bool:
    """An enumeration that makes its members' values itself."""
    return isinstance(cls, enum.EnumMeta) and not {"__new__", "__init__"}.isdisjoint(body.co_names)


def _values(cls: type, name: str) -> Iterator[Any]:
    """What the class has now for a name that its body sets: a member, an attribute, a field's default."""
    own = vars(cls)
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        yield cls.__members__[name]._value_
        return
    if name in own and (isinstance(own[name], property) or not hasattr(type(own[name]), "__get__")):
        yield own[name]  # save for what __slots__ and NamedTuple put in the place of a field
    field = own.get("__dataclass_fields__", {}).get(name)
    if field is not None and field.default is not dataclasses.MISSING:
        yield field.default
    if name in own.get("_field_defaults", {}):
        yield own["_field_defaults"][name]


def _value_difference(what: str, live: Any, text: ast.expr, scope: Scope, local: Collection[str] = ()) -> str | None:
    value = _value_of(text, scope, local)
    if (
        value is _UNKNOWN
        or value is live
        or (isinstance(value, float | int) and type(live) is type(value) and live == value)
    ):
        return None
    data = isinstance(value, _PLAIN_DATA) and type(live) is type(value)
    if data and (repr(live) == repr(value) or (isinstance(value, set | frozenset) and live == value)):
        return None
    if not isinstance(value, _PLAIN_DATA):
        return f"{what} is not the {ast.unparse(text)} of now"
    return f"{what} is {reprlib.repr(live)}, and the text says {reprlib.repr(value)}"


def _is_arithmetic(node: ast.expr, scope: Scope, local: Collection[str]) -> bool:
    """Whether the expression reads nothing but constants and calls nothing but Python's own conversions."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) or (isinstance(part, ast.Name) and part.id not in _PURE):
            return False
        if isinstance(part, ast.Name) and (part.id in local or part.id in scope):
            return False
    return True


def _value_of(node: ast.expr, scope: Scope, local: Collection[str] = ()) -> Any:
    """The value of a constant expression or of a dotted name that begins at a module or class; else _UNKNOWN."""
    if isinstance(node, ast.Name):
        return _UNKNOWN if node.id in local else scope.get(node.id, getattr(builtins, node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        above = _value_of(node.value, scope, local)
        return getattr(above, node.attr, _UNKNOWN) if isinstance(above, types.ModuleType | type) else _UNKNOWN
    code = compile(ast.Expression(node), "<constant>", "eval", dont_inherit=True)
    if any(True for _ in inner_codes(code)) or not _is_arithmetic(node, scope, local):
        return _UNKNOWN
    try:
        return eval(code, {"__builtins__": _PURE})  # it calls nothing else, so it has no effect
    except Exception:
        return _UNKNOWN
