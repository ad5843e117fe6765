"""When a step's collectives are asked for, and when they are needed: a ``Plan``, as a recorded step gives one, derived
from a model's sizes, the registry's facts, and what each strategy's code does.

- FSDP gathers one block ahead. A block's gradients must have left when the next block's are ready to. It is the device's
  streams that let it: on CPU ranks, which have none, it waits for each collective.
- DDP reduces buckets while backward goes on, and needs them when it is over. A bucket is full at 1 MiB, later ones at 25 MiB
  of 32-bit weights.
- ZeRO by hand waits for each of its collectives; with ``prefetch``, ZeRO-3 gathers one block ahead.
- What belongs to the optimizer's step has nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from chapter19_9.choosing.cost import Precision
from chapter19_9.choosing.flops import Flops
from chapter19_9.choosing.presets import Model
from chapter19_9.slow_link import Asked, Plan
from chapter19_9.strategies import Exchange, Strategy, get

AHEAD = ("fsdp1", "fsdp1_grad_op", "fsdp2", "fsdp2_no_reshard", "fsdp2_root_only")
MIB = 2**20


class Clock:
    """Seconds of computing at which each block's forward and backward begin and end."""

    def __init__(self, flops: Flops, computing: float) -> None:
        each = computing / flops.total
        layers, forward, backward = flops.layers, each * flops.block_forward, each * flops.block_backward
        self.end = computing
        self.forward = [number * forward for number in range(layers)]
        self.loss = layers * forward + each * flops.output_forward  # and here backward begins
        self.output_done = self.loss + each * flops.output_backward
        self.backward = [self.output_done + (layers - 1 - number) * backward for number in range(layers)]
        self.done = [start + backward for start in self.backward]
        self.done[0] = computing  # not a rounding error later


def schedule(
    strategy: str, model: Model, n: int, precision: Precision, flops: Flops, computing: float, *, last: bool = True,
    bucket_mb: float | None = None, prefetch: bool = False,
) -> Plan:  # fmt: skip
    """One pass of n ranks that compute for so many seconds. last: the pass that ends a step; the ones before it leave
    out what is exchanged once a step. bucket_mb, prefetch: as in ``train``, and ``zero3``. Raises ValueError for a
    strategy that is not registered."""
    ahead = prefetch or strategy in AHEAD
    caps = (MIB, 25 * MIB) if bucket_mb is None else (bucket_mb * MIB,) * 2
    facts, clock = get(strategy), Clock(flops, computing)
    found: list[Asked] = []
    for exchange in facts.communicates if n > 1 else ():
        if last or exchange.every == "pass":
            for name, size, at, by in _asked(facts, exchange, model, clock, caps, ahead):
                element = precision.parameters if exchange.of == "parameters" else precision.gradients
                found.append(Asked(name, element * size, n, at, by, 0.0))
    return Plan(computing, tuple(sorted(found, key=lambda one: (one.at, one.by))))


def _asked(
    facts: Strategy, exchange: Exchange, model: Model, clock: Clock, caps: tuple[float, float], ahead: bool
) -> Iterator[tuple[str, int, float, float]]:
    """(collective, numbers in its tensor, when it is asked for, when it is needed)."""
    name, layers = exchange.collective, model.layers
    if name == "broadcast":  # one for each tensor
        for size, _ in _tensors(model):
            yield name, size, clock.end, clock.end
        return
    if name == "all_reduce":
        for size, at in _buckets(model, clock, caps):
            yield name, size, at, clock.end
        return
    moments: dict[str, tuple[float, float]] = {  # of the root, or of the only unit
        "forward": (0.0, 0.0),
        "backward": (clock.loss, clock.loss) if exchange.of == "parameters" else (clock.end, clock.end),
        "optimizer": (clock.end, clock.end),
    }
    by_block = facts.units == "blocks"
    if exchange.part != "blocks":
        yield name, model.root if by_block else model.parameters, *moments[exchange.when]
    for number in range(layers) if by_block and exchange.part != "root" else ():
        at = by = clock.end
        if exchange.when == "forward":
            by = clock.forward[number]
            at = clock.forward[max(0, number - 1)] if ahead else by
        elif exchange.when == "backward" and exchange.of == "parameters":
            by = clock.backward[number]
            at = by if not ahead else clock.backward[number + 1] if number + 1 < layers else clock.loss
        elif exchange.when == "backward":
            at = clock.done[number]
            by = clock.done[max(0, number - 1)] if facts.name in AHEAD else at
        yield name, model.block, at, by


def _tensors(model: Model) -> list[tuple[int, int]]:
    """(numbers, block or -1 before the blocks or ``layers`` after them) of each tensor, in order."""
    first = [model.vocabulary * model.width, *([model.length * model.width] if model.positions else [])]
    last = [model.width] * (model.norm // model.width) + ([] if model.tied else [model.vocabulary * model.width])
    blocks = [(size, number) for number in range(model.layers) for size in model.block_tensors]
    return [*((size, -1) for size in first), *blocks, *((size, model.layers) for size in last)]


def _buckets(model: Model, clock: Clock, caps: tuple[float, float]) -> Iterator[tuple[int, float]]:
    """(numbers, when the last of them is computed) of DDP's buckets; in a block, gradients come one after the other."""
    filled, first, at = 0, True, clock.output_done
    made = 0  # of the block's gradients
    for size, number in reversed(_tensors(model)):
        if number < 0:
            at = clock.end
        elif number < model.layers:
            made = size + made % model.block
            start, end = clock.backward[number], clock.done[number]
            at = start + (end - start) * made / model.block
        filled += size
        if 4 * filled >= caps[0 if first else 1]:
            yield filled, at
            filled, first = 0, False
    if filled:
        yield filled, at
