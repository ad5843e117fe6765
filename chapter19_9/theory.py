"""The formulas, derived from the registry's facts: model-state memory, bytes sent, global batch.

``memory`` and ``volume`` are the textbook's, for states of any size; ``exact_memory`` and ``exact_volume`` are
those of a given model to the byte, with padding and uneven shares.

Notation: P, G, O are parameters, gradients and optimizer states; M_P, M_G, M_O their bytes on one device; N
the number of data-parallel ranks. Communication is logical: what each rank sends on an ideal ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from chapter19_9.combining import elements
from chapter19_9.pieces import Shape, pieces_of
from chapter19_9.strategies import Exchange, Strategy, get
from d2l_utils.batch import Batch, combinations, global_batch, nearest
from d2l_utils.traffic import sent_on_ring

if TYPE_CHECKING:
    from torch import nn

    from d2l_utils.transformer import TransformerConfig

__all__ = [
    "Batch",
    "Shape",
    "States",
    "adamw_states",
    "combinations",
    "exact_memory",
    "exact_volume",
    "fullest",
    "global_batch",
    "memory",
    "mixed_precision_states",
    "nearest",
    "paper_table",
    "shapes",
    "volume",
]


STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class States:
    """Bytes of the model states: M_P, M_G, M_O."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def shapes(model: nn.Module | TransformerConfig) -> list[Shape]:
    """The parameters of a model that is not sharded yet, or of the toy Transformer of a config."""
    from chapter19_9.strategies.shards import blocks, entries
    from d2l_utils.transformer import TransformerConfig

    if isinstance(model, TransformerConfig):
        return list(_shapes(model))
    return [
        Shape(entry.names[0], tuple(entry.parameter.shape), entry.parameter.requires_grad, unit, len(entry.names))
        for unit, entry in entries(model, blocks(model))
    ]


@cache
def _shapes(config: TransformerConfig) -> tuple[Shape, ...]:
    """A panel asks for the same ones again and again."""
    import torch

    from d2l_utils.transformer import Transformer

    with torch.device("meta"):
        return tuple(shapes(Transformer(config)))


def adamw_states(config: TransformerConfig, element: int = 4) -> States:
    """M_P, M_G, M_O of the toy Transformer under AdamW, whole; ``element`` is the bytes of one number.

    AdamW keeps two numbers for every trained one and a step count of 4 bytes for every trained tensor. A
    frozen parameter has no gradient and no state.
    """
    trained = [shape.numel for shape in shapes(config) if shape.trained]
    return States(
        parameters=element * config.parameter_count,
        gradients=element * sum(trained),
        optimizer=2 * element * sum(trained) + 4 * len(trained),
    )


def mixed_precision_states(count: float) -> States:
    """M_P, M_G, M_O of ``count`` parameters under mixed-precision Adam: 2 + 2 + 12 bytes each.

    Parameters and gradients have 16 bits. The optimizer keeps 32-bit weights, momentum and variance.
    """
    return States(parameters=2 * count, gradients=2 * count, optimizer=12 * count)


def paper_table(
    counts: Sequence[float] = (7.5e9, 128e9, 1e12), ranks: Sequence[int] = (1, 4, 16, 64, 256, 1024)
) -> list[tuple[float, int, float, float, float]]:
    """Table 1 of the ZeRO paper (arXiv 1910.02054): (parameters, ranks, GB of stage 1, of 2, of 3), GB = 1e9 bytes."""
    stages = ("zero1", "zero2", "zero3")
    rows = []
    for n in ranks:
        for count in counts:
            one, two, three = (memory(stage, mixed_precision_states(count), n).total / 1e9 for stage in stages)
            rows.append((count, n, one, two, three))
    return rows


def fullest(ranks: Iterable[Any]) -> States:
    """Each state's bytes on the rank that has most of it; of ``States``, or of what ``d2l_utils.memory.held`` measured."""
    held = list(ranks)
    return States(*(max(getattr(each, name) or 0 for each in held) for name in STATES))


def memory(strategy: Strategy | str, states: States, n: int) -> States:
    """Bytes of model states on each of ``n`` ranks, at rest, as the textbook has it: a replicated state does
    not depend on ``n``, a sharded one is divided by it. ``exact_memory`` knows padding and uneven shares.

    Raises ValueError for an unknown strategy or a bad ``n``.
    """
    facts = _facts(strategy, n)
    divided = {name: getattr(states, name) / (n if getattr(facts, name) == "sharded" else 1) for name in STATES}
    return States(**divided)


def volume(strategy: Strategy | str, states: States, n: int, passes: int = 1) -> float:
    """Bytes that each of ``n`` ranks sends in one step, as the textbook has it: for DDP 2(N-1)/N M_G.

    passes: backward passes in the step. Errors as in ``memory``.
    """
    return _sent(_facts(strategy, n), n, passes, lambda exchange: getattr(states, exchange.of))


def exact_memory(strategy: Strategy | str, model: Sequence[Shape], n: int, precision: str = "fp32") -> list[States]:
    """Bytes of model states under AdamW that each rank holds at rest, in rank order. precision: what forward and
    backward compute in; "fp32", "bf16" or "fp16". Errors as in ``memory``."""
    facts, size = _facts(strategy, n), elements(strategy, precision)
    pieces = pieces_of(facts, model, n, size)
    outside = facts.cut in ("flat", "even")  # frozen parameters are in no flat vector
    apart = size.parameters * sum(shape.numel for shape in model if not shape.trained) if outside else 0
    master = 4 if facts.masters else size.master
    ranks = []
    for rank in range(n):
        whole = {state: getattr(facts, state) == "replicated" for state in STATES}
        trained = [piece for piece in pieces if piece.trained]
        ranks.append(
            States(
                parameters=size.parameters * sum(piece.whole if whole["parameters"] else piece.kept for piece in pieces)
                + (apart if whole["parameters"] else 0),
                gradients=sum(
                    size.gradients * piece.whole + size.unscaled * piece.kept
                    if whole["gradients"]
                    else (size.unscaled or size.gradients) * piece.reduced(rank)
                    for piece in trained
                ),
                optimizer=sum(8 * piece.stepped[rank] + master * piece.kept for piece in trained)
                + 4 * (1 if facts.masters else sum(piece.counts[rank] for piece in trained)),
            )
        )
    return ranks


def exact_volume(
    strategy: Strategy | str,
    model: Sequence[Shape],
    n: int,
    passes: int = 1,
    *,
    precision: str = "fp32",
    sync_every: bool = False,
    clip: bool = False,
) -> float:
    """Bytes that each of ``n`` ranks sends in one step, mean over the ranks. As ``volume``; precision as in
    ``exact_memory``; sync_every: gradients are exchanged in every backward, also where they could wait.

    Where gradients end in parts, two more numbers are all-reduced: the squared norm in float64 for ``clip``, and for fp16
    a float32 that says whether all are finite."""
    facts, size = _facts(strategy, n), elements(strategy, precision)
    pieces = pieces_of(facts, model, n, size)

    def payload(exchange: Exchange) -> int:
        of = [piece for piece in pieces if piece.trained or exchange.of == "parameters"]
        element = size.gathered if exchange.of == "parameters" else size.reduced
        of = [p for p in of if exchange.part == "all" or (exchange.part == "root") == (p.unit == "")]
        if exchange.of == "gradients":
            return element * sum(p.whole if p.bare is None else p.bare for p in of)
        # where tensors are gathered one by one, each use is a gather, and a frozen one needs none in backward
        again = facts.units != "tensors" or exchange.when != "backward"
        return element * sum(p.uses * p.whole for p in of if again or p.trained)

    parts = facts.cut in ("flat", "rows", "even")
    asked = facts.norm + (8 if clip and parts else 0) + (4 if precision == "fp16" and parts else 0)
    return _sent(facts, n, passes, payload, sync_every) + (sent_on_ring("all_reduce", asked, n) or 0.0)


def _sent(
    facts: Strategy, n: int, passes: int, payload: Callable[[Exchange], float], sync_every: bool = False
) -> float:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"passes is {passes!r}: it must be a whole number of at least 1")
    total = 0.0
    for exchange in facts.communicates:
        # weights that stay while gradients wait go with them when they do not
        each = exchange.every == "pass" or (sync_every and exchange.when != "optimizer")
        times = passes if each else 1
        total += times * (sent_on_ring(exchange.collective, payload(exchange), n) or 0.0)  # type: ignore[arg-type]
    return total


def _facts(strategy: Strategy | str, n: int) -> Strategy:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n is {n!r}: it must be a whole number of at least 1")
    return get(strategy) if isinstance(strategy, str) else strategy
