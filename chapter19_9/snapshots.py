"""What a rank holds of the model states at three moments of a step: at rest, between forward and backward, at the peak.

    run = launch(snapshots, world_size=4, strategy="fsdp2")
    run.results[0].between.parameters

Counted are the bytes that live tensors cover, by distinct memory, at the recorder's samples. Gathered weights are
parameters, and memory that gradients keep from step to step is gradients, whether or not a gradient is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chapter19_9 import theory
from chapter19_9.recorded import DEFAULT, recorded_step
from chapter19_9.strategies import get
from chapter19_9.train import Result, train
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


def snapshots(
    strategy: str, config: TransformerConfig = DEFAULT, *, batch: int = 8, options: Mapping[str, Any] | None = None
) -> Snapshots:
    """Record one step after two, on every rank of the process group. Arguments and errors: ``recorded_step``."""
    recorded = recorded_step(strategy, config, batch=batch, options=options, outliving=True)
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
    """(what ``train`` measures with its last step recorded, what is held inside a step) of each strategy, in one launch.

    None for what is not PyTorch's: DeepSpeed's engine has no step that could be looked into. Hand-written ZeRO
    reduces with the backend's own reduce-scatter here, so that all are told in the same collectives.
    """
    found: dict[str, tuple[Result, Snapshots | None]] = {}
    for name in strategies:
        by_hand = "reduce_scatter" in inspect.signature(get(name).load().shard).parameters
        options = {"reduce_scatter": "backend"} if by_hand else None
        result = train(name, config, steps=steps, batch=batch, options=options, record_step=steps - 1, allocations=True)
        look = not get(name).extra
        found[name] = result, snapshots(name, config, batch=batch, options=options) if look else None
    return found


def _held(recording: Recording, moment: float) -> theory.States:
    """The sums over all blocks, each as it was last seen before."""
    last = {holding.block: holding for holding in recording.holdings if holding.time <= moment}
    return theory.States(*(sum(getattr(holding, kind) for holding in last.values()) for kind in theory.STATES))
