"""Which names the text of a definition reads, and in which order definitions can stand in one script."""

import ast
import functools
import symtable
import sys
from collections.abc import Iterable, Mapping
from typing import Any

FUTURE_ANNOTATIONS = "from __future__ import annotations\n"
_LATE_ANNOTATIONS = sys.version_info >= (3, 14)  # evaluated when somebody asks for them


@functools.lru_cache(256)
def global_names(text: str, future_annotations: bool = False) -> frozenset[str]:
    """Names that the definition in `text` reads from outside itself.

    future_annotations: with `from __future__ import annotations` a name in an annotation is not read.
    """
    names: set[str] = set()
    # symtable takes `count += 1` for an assignment alone
    changed = {node.target.id for node in ast.walk(ast.parse(text)) if _changes_name(node)}  # type: ignore[attr-defined]

    def walk(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                names.add(name)
            if name in changed and symbol.is_declared_global():
                names.add(name)
        for child in table.get_children():
            walk(child, False)

    walk(symtable.symtable(FUTURE_ANNOTATIONS * future_annotations + text, "<cell>", "exec"), True)
    return frozenset(names)


def _changes_name(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)


def in_order(texts: dict[str, str], future_annotations: bool = False) -> list[str]:
    """The names in the order given, save that what a definition needs at once comes before it.

    A function's body may name what follows; its decorators, defaults and annotations, and a class's bases and body may not.
    They may call what they name, so whatever that names comes before too, unless it needs this very definition at once.
    future_annotations: with them an annotation may name what follows. What it names comes before where that is possible, since
    a decorator may ask for it.
    """
    at_once = {name: needed_at_once(text, future_annotations) & texts.keys() for name, text in texts.items()}
    wished = {name: needed_at_once(text, annotations=True) & texts.keys() for name, text in texts.items()}
    named = {name: global_names(text) & texts.keys() for name, text in texts.items()}
    placed: dict[str, None] = {}

    def place(name: str, above: tuple[str, ...]) -> None:
        first, below = at_once[name], {name, *above}
        called = {other for other in reached(wished[name], named) if not below & reached({other}, at_once)}
        for other in [*filter(first.__contains__, texts), *filter(called.__contains__, texts)]:
            if other not in below and other not in placed:
                place(other, (*above, name))
        placed.setdefault(name)

    for name in texts:
        place(name, ())
    return list(placed)


def reached(names: Iterable[str], links: Mapping[str, frozenset[str]]) -> set[str]:
    """`names`, and all to which links lead from them."""
    found, todo = set(names), list(names)
    while todo:
        new = links[todo.pop()] - found
        found |= new
        todo += new
    return found


@functools.lru_cache(256)
def needed_at_once(text: str, future_annotations: bool = False, *, annotations: bool = False) -> frozenset[str]:
    """Names that the definition in `text` reads as soon as it is executed, before anything is called.

    future_annotations: as in `global_names`. annotations: count them in any case.
    """
    late = (future_annotations or _LATE_ANNOTATIONS) and not annotations
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
        later: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)] if late else []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            later += node.body if isinstance(node.body, list) else [node.body]
        todo += [child for child in ast.iter_child_nodes(node) if child not in later]
    return frozenset(names)
