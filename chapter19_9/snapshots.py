"""What a rank holds of the model states at three moments of a step: at rest, between forward and backward, at the peak.

    run = launch(measure, world_size=4, strategies=["ddp", "fsdp2"])
    result, seen = run.results[0]["fsdp2"]
    seen.between.parameters

Counted are the bytes that live tensors cover, by distinct memory, at the recorder's samples. Gathered weights are
parameters, and memory that gradients keep from step to step is gradients, whether or not a gradient is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chapter19_9 import theory
from chapter19_9.recorded import Recorded
from chapter19_9.strategies import get
from chapter19_9.train import DEFAULT, Result, train
from d2l_utils.events import Recording
from d2l_utils.transformer import TransformerConfig

__all__ = ["Snapshots", "measure", "snapshots"]


@dataclass(frozen=True)
class Snapshots:
    """Model states on one rank, in bytes. at_peak: when all tensors together were most, which is ``peak`` bytes."""

    rest: theory.States
    between: theory.States
    at_peak: theory.States
    peak: int


def snapshots(recorded: Recorded) -> Snapshots:
    """Read them off a step that ``train(..., lifecycle_step=, outliving=True)`` recorded."""
    recording = recorded.recording
    forward = [event.end or 0.0 for event in recording.events if event.kind == "forward"]
    # a unit may be let go by what runs after its module's forward
    forward += [holding.time for holding in recording.holdings if holding.at == "after forward"]
    most = max(recording.memory, key=lambda point: point.bytes)
    return Snapshots(
        rest=_held(recording, recording.seconds or 0.0),
        between=_held(recording, max(forward)),
        at_peak=_held(recording, most.time),
        peak=recorded.start + most.bytes,
    )


def measure(
    strategies: Sequence[str], config: TransformerConfig = DEFAULT, *, steps: int = 6, batch: int = 8
) -> dict[str, tuple[Result, Snapshots | None]]:
    """(what ``train`` measures with the last of ``steps`` recorded, what is held inside a later one) of each strategy,
    in one launch. Two more are recorded, and the peak is the least of the three: what a backend's thread lets go of late
    comes on top of what the strategy takes.

    None for what is not PyTorch's: DeepSpeed's engine has no step that could be looked into. Hand-written ZeRO
    reduces with the backend's own reduce-scatter here, so that all are told in the same collectives.
    """
    found: dict[str, tuple[Result, Snapshots | None]] = {}
    for name in strategies:
        by_hand = "reduce_scatter" in inspect.signature(get(name).load().shard).parameters
        options = {"reduce_scatter": "backend"} if by_hand else None
        # Apart: memory that one recording has seen come would be seen to go in the next, as if it had been in the state.
        *recorded, last = range(steps - 1, steps + 6, 2)
        look = None if get(name).extra else last
        result = train(
            name, config, steps=last + 1, batch=batch, options=options, record_step=recorded,
            allocations=True, lifecycle_step=look, outliving=True,
        )  # fmt: skip
        peaks = [recording.peak or 0 for recording in result.recordings]
        result = replace(result, peak=(result.peak or 0) - peaks[-1] + min(peaks))
        found[name] = replace(result, lifecycle=None), None if look is None else snapshots(result.lifecycle)
    return found


def _held(recording: Recording, moment: float) -> theory.States:
    """The sums over all blocks, each as it was last seen before."""
    last = {holding.block: holding for holding in recording.holdings if holding.time <= moment}
    return theory.States(*(sum(getattr(holding, kind) for holding in last.values()) for kind in theory.STATES))
