"""What ``train`` returns on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from d2l_utils.memory import Held


@dataclass(frozen=True)
class Result:
    """What one rank saw of a training run. Lists have one value a step, from step ``first`` on.

    losses         : mean loss over the whole global batch, in nats; the same on every rank. Before the
                     step's update.
    local_losses   : mean loss over this rank's own part.
    gradient_norms : 2-norm of the whole gradient, after any averaging and before any clipping.
    seconds        : forward, backward and optimizer step; the first includes torch's own warm-up.
    differences    : largest difference between the ranks' weights after the step; empty unless asked for.
    held           : bytes held after the last step, gradients included.
    agree          : all ranks end with exactly the same weights. Of weights in shards: each rank gathers the
                     same whole ones. None where it was not asked.
    changed        : training changed the weights.
    recordings     : the recorded steps (``d2l_utils.events.Recording``); ``recording`` is the last, or None.
    peak           : most bytes in the last recorded step: the model states at its start, and what it took on top of
                     them (gathered weights, gradients, activations); None unless ``allocations``.
    saved          : bytes that this step's largest forward saved for its backward, without weights; None
                     unless ``allocations``.
    lifecycle      : ``lifecycle_step``, for ``chapter19_9.lifecycle.frames``, or None.
    weights, gradients : whole ones by parameter name, on the CPU, after the last step; None unless asked for.
    """

    strategy: str
    rank: int
    world_size: int
    losses: list[float]
    local_losses: list[float]
    gradient_norms: list[float]
    seconds: list[float]
    differences: list[float]
    held: Held
    agree: bool | None
    changed: bool
    recordings: tuple[Any, ...] = ()
    peak: int | None = None
    saved: int | None = None
    lifecycle: Any = None
    weights: dict[str, Tensor] | None = None
    gradients: dict[str, Tensor] | None = None
    first: int = 0

    @property
    def recording(self) -> Any:
        return self.recordings[-1] if self.recordings else None
