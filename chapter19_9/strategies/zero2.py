"""ZeRO stage 2 by hand: only parameters are copied; gradients and optimizer are sharded.

Shards gradients and optimizer states, unit by unit: a unit is one block, or all that is in no block. As soon as
backward has made the last gradient of a unit, they are reduced to their owners (a reduce-scatter, then / N) and
the whole ones are freed, so that the whole gradients of the model never exist at once. The optimizer step
updates shards and all-gathers them, as in ZeRO-1. Costs M_P + (M_G + M_O) / N on every rank, and
(N-1)/N (M_G + M_P) sent by each rank in a step; with accumulation M_G in every backward, since what waited
for the last one would have to be whole. API: ``torch.distributed``. Paper: ZeRO (arXiv 1910.02054), P_os+g.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from chapter19_9.strategies import shards
from chapter19_9.strategies.ring import How
from chapter19_9.strategies.shards import Group, full_state_dict, gathered, gradient_parts, load_full
from chapter19_9.strategies.zero1 import Whole, optimizer

__all__ = ["full_state_dict", "gathered", "gradient_parts", "load_full", "optimizer", "shard"]


class ShardedGradient(Whole):
    """With the shard of the gradient beside it: whole ones leave as soon as the unit has them all."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.missing = len(self.entries)
        for entry in self.entries:
            entry.parameter.register_post_accumulate_grad_hook(self.arrived)

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter) -> None:
        """Backward has made one of the unit's gradients; with the last one, reduce them all."""
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.entries)
        whole = self.layout.pack(entry.parameter.grad for entry in self.entries)  # type: ignore[misc]
        for entry in self.entries:
            entry.parameter.grad = None
        mean = self.average(whole.new_empty(self.layout.shard), whole)
        self.averaged = mean if self.averaged is None else self.averaged.add_(mean)

    def finish(self) -> None:
        """After the last backward: all has left already. ValueError when a gradient never came."""
        if self.averaged is None or self.missing < len(self.entries):
            unused = [entry.names[0] for entry in self.entries if entry.parameter.grad is None]
            raise ValueError(
                f"no gradient for {', '.join(map(repr, unused))}: forward did not use them. "
                "The rest of their unit waits for them: freeze or remove them"
            )

    def clear(self) -> None:
        self.averaged, self.missing = None, len(self.entries)
        for entry in self.entries:
            entry.parameter.grad = None


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype | str = torch.float32,
    group: Group | None = None,
    reduce_scatter: How = "auto",
) -> nn.Module:
    """Lay the trained parameters of each unit end to end. Arguments as in ``zero1.shard``."""
    shards.broadcast(model.to(device))
    dtype = shards.element_type(dtype)
    make = partial(ShardedGradient, dtype=dtype, how=reduce_scatter)
    shards.flatten(model, make, shards.blocks(model), group)
    return model.to(dtype)  # what is not in the flat vectors
