"""How a model's parameters are cut, gathered and reduced under each strategy: what the exact formulas add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

from chapter19_9.strategies import Strategy

if TYPE_CHECKING:
    from chapter19_9.combining import Elements


@dataclass(frozen=True)
class Shape:
    """One distinct parameter of a model: tied weights are one, with so many ``uses``. ``unit``: its block's name, ""
    in no block."""

    name: str
    size: tuple[int, ...]
    trained: bool
    unit: str
    uses: int = 1

    @property
    def numel(self) -> int:
        return prod(self.size)


@dataclass(frozen=True)
class Piece:
    """What is cut, gathered or reduced as one. Elements: ``whole`` with padding, ``kept`` of it on each rank
    where it is sharded; by rank, those that the optimizer trains and in how many tensors. ``bare``: what is reduced of
    it, if not the whole; ``averaged``: by rank, what is kept of its gradient, if not ``kept``."""

    unit: str
    trained: bool
    whole: int
    kept: int
    stepped: tuple[int, ...]
    counts: tuple[int, ...]
    uses: int = 1
    bare: int | None = None
    averaged: tuple[int, ...] = ()

    def reduced(self, rank: int) -> int:
        return self.averaged[rank] if self.averaged else self.kept


def pieces_of(facts: Strategy, model: Sequence[Shape], n: int, size: Elements) -> list[Piece]:
    """The pieces of a model that is not sharded yet, on ``n`` ranks. size: bytes of one number."""
    cut = {"none": _uncut, "tensors": _by_tensors, "rows": _by_rows, "flat": _flat, "even": _even}[facts.cut]
    if facts.align > 1:  # FSDP1 counts it in bytes of what is gathered
        facts = replace(facts, align=4 * facts.align // size.gathered)
    if facts.units == "model":
        model = [replace(shape, unit="") for shape in model]
    if facts.units == "tensors":
        model = [replace(shape, unit=shape.name) for shape in model]
    return cut(facts, model, n)


def _uncut(facts: Strategy, model: Sequence[Shape], n: int) -> list[Piece]:
    return [Piece(s.unit, s.trained, s.numel, s.numel, (s.numel,) * n, (1,) * n) for s in model]


def _by_tensors(facts: Strategy, model: Sequence[Shape], n: int) -> list[Piece]:
    """ZeroRedundancyOptimizer's greedy way: the largest first, to the rank with the fewest so far."""
    load, pieces = [0] * n, []
    for shape in sorted(model, key=lambda shape: -shape.numel):
        owner = load.index(min(load))
        load[owner] += shape.numel
        mine = [int(rank == owner) for rank in range(n)]
        stepped = tuple(shape.numel * is_mine for is_mine in mine)
        pieces.append(Piece(shape.unit, shape.trained, shape.numel, shape.numel, stepped, tuple(mine)))
    return pieces


def _by_rows(facts: Strategy, model: Sequence[Shape], n: int) -> list[Piece]:
    """FSDP2: chunks of dimension 0, stored and sent as if all were as large as the first."""
    pieces = []
    for shape in model:
        rows, rest = shape.size[0], prod(shape.size[1:])
        chunk = -(-rows // n)
        stepped = tuple(rest * min(chunk, max(0, rows - rank * chunk)) for rank in range(n))
        pieces.append(Piece(shape.unit, shape.trained, n * chunk * rest, chunk * rest, stepped, (1,) * n))
    return pieces


def _flat(facts: Strategy, model: Sequence[Shape], n: int) -> list[Piece]:
    """Units end to end. By hand, trained and frozen are apart and a rank trains its shard as one tensor; in FSDP1
    they are together, and what a rank has of each parameter is a tensor of its own."""
    if facts.align > 1:
        return [_aligned([s for s in model if s.unit == unit], facts.align, n) for unit in _units(model)]
    pieces = []
    for unit in _units(model):
        for trained in (True, False) if facts.parameters == "sharded" else (True,):
            if numel := sum(s.numel for s in model if s.unit == unit and s.trained == trained):
                shard = -(-numel // n)
                uses = sum(s.uses for s in model if s.unit == unit) if facts.units == "tensors" else 1
                pieces.append(Piece(unit, trained, n * shard, shard, (shard,) * n, (1,) * n, uses))
    return pieces


def _even(facts: Strategy, model: Sequence[Shape], n: int) -> list[Piece]:
    """DeepSpeed's stages 1 and 2: one vector of all trained parameters, unpadded when it is reduced. Where a shard ends
    in a tensor, both its owners keep that tensor's whole gradient."""
    ends = list(accumulate(shape.numel for shape in model if shape.trained))
    spans, shard = list(pairwise([0, *ends])), 2 * -(-ends[-1] // (2 * n))
    averaged = []
    for first in range(0, n * shard, shard):
        last = first + shard
        touched = sum(end - start for start, end in spans if start < last and end > first)
        averaged.append(touched + max(0, last - max(first, ends[-1])))
    return [Piece("", True, n * shard, shard, (shard,) * n, (1,) * n, bare=ends[-1], averaged=tuple(averaged))]


def _aligned(unit: Sequence[Shape], align: int, n: int) -> Piece:
    """FSDP1's flat parameter of one unit."""
    spans, end = [], 0
    for shape in unit:
        start = -(-end // align) * align
        end = start + shape.numel
        spans.append((start, end, shape.trained))
    shard = -(-end // n)
    stepped, counts = [], []
    for rank in range(n):
        mine = [min(last, (rank + 1) * shard) - max(first, rank * shard) for first, last, trained in spans if trained]
        stepped.append(sum(size for size in mine if size > 0))
        counts.append(sum(size > 0 for size in mine))
    return Piece(unit[0].unit, any(s.trained for s in unit), n * shard, shard, tuple(stepped), tuple(counts))


def _units(model: Sequence[Shape]) -> list[str]:
    return list(dict.fromkeys(shape.unit for shape in model))
