"""What a strategy can be told by inside a step, derived from the registry's facts: what is held between forward and
backward, and how many collectives run. The textbook's sums are in ``theory``; this is what makes "style" precise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chapter19_9.combining import Elements
from chapter19_9.pieces import Piece, Shape, pieces_of
from chapter19_9.strategies import Exchange, Strategy, get
from chapter19_9.theory import States, exact_memory

__all__ = ["between", "launches"]

MIB = 2**20


def between(strategy: str, model: Sequence[Shape], n: int) -> list[States]:
    """Bytes of model states that each rank holds when forward is done and backward has not begun, in rank order.

    Weights that were gathered for forward and are not gathered again for backward are still there, whole, beside the
    shards. Gradients of the step before are gone, except where their memory is kept: DDP's buckets, ZeRO-1's whole
    gradient. Counted is what tensors cover: of the padding behind whole ones only what is in the rank's own shard, and
    none behind FSDP2's last rows.
    Raises ValueError for an unknown strategy or a bad ``n``.
    """
    facts = get(strategy)
    rest = exact_memory(facts, model, n)
    if n == 1 and facts.communicates and strategy.startswith("fsdp1"):
        facts = get("single")  # it shards nothing for one rank
    pieces = pieces_of(facts, model, n, Elements())
    again = [exchange for exchange in _gathers(facts) if exchange.when == "backward"]
    kept = [
        piece
        for exchange in _gathers(facts)
        for piece in pieces
        if exchange.when == "forward" and _in(exchange, piece) and not any(_in(other, piece) for other in again)
    ]
    units = {piece.unit for piece in kept}
    here = [shape for shape in model if facts.units == "model" or shape.unit in units] if kept else []
    whole = 4 * sum(shape.numel for shape in here) if facts.cut == "rows" else 4 * sum(piece.whole for piece in kept)
    every, trained = 4 * sum(s.numel for s in model), 4 * sum(s.numel for s in model if s.trained)
    stays = facts.gradients == "replicated" and bool(facts.communicates)
    return [
        States(
            parameters=whole
            + (s.parameters if facts.parameters == "sharded" else every + _padding(pieces, model, rank)),
            gradients=trained if stays else 0,
            optimizer=s.optimizer,
        )
        for rank, s in enumerate(rest)
    ]


def launches(strategy: str, model: Sequence[Shape], n: int) -> dict[str, int]:
    """How many collectives of each kind a step launches on each rank; {} for one rank, which has nobody to tell.

    One for each unit that is gathered or reduced, one for each tensor that is broadcast, and for DDP one for each
    bucket: 1 MiB first, then 25 MiB, filled with whole gradients from the last parameter to the first.
    """
    facts, counts = get(strategy), Counter[str]()
    pieces = pieces_of(facts, model, n, Elements())
    for exchange in facts.communicates if n > 1 else ():
        of = [piece for piece in pieces if _in(exchange, piece) and (piece.trained or exchange.of == "parameters")]
        if exchange.collective == "all_reduce":
            counts["all_reduce"] += _buckets([shape.numel * 4 for shape in model if shape.trained])
        elif exchange.collective == "broadcast":
            counts["broadcast"] += len(of)
        elif facts.cut == "rows":  # one for all tensors of a unit
            counts[exchange.collective] += len({piece.unit for piece in of})
        else:
            counts[exchange.collective] += len(of)
    return dict(counts)


def _padding(pieces: Sequence[Piece], model: Sequence[Shape], rank: int) -> int:
    """Bytes of padding in a rank's own shards, where whole flat vectors are kept."""
    total = 0
    for piece in pieces:
        if piece.kept < piece.whole:
            real = sum(shape.numel for shape in model if shape.unit == piece.unit and shape.trained)
            total += max(0, (rank + 1) * piece.kept - max(real, rank * piece.kept))
    return 4 * total


def _gathers(facts: Strategy) -> list[Exchange]:
    return [e for e in facts.communicates if e.collective == "all_gather" and e.of == "parameters"]


def _in(exchange: Exchange, piece: Piece) -> bool:
    return exchange.part == "all" or (exchange.part == "root") == (piece.unit == "")


def _buckets(sizes: Sequence[int]) -> int:
    """Buckets for gradients of these bytes, in the order of the parameters."""
    buckets, filled = 0, 0
    for size in reversed(sizes):
        filled += size
        if filled >= (MIB if buckets == 0 else 25 * MIB):
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0)
