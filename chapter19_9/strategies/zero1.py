"""ZeRO stage 1 by hand: parameters and gradients are copied, the optimizer is sharded.

Shards the optimizer states, unit by unit: a unit is one block, or all that is in no block. Backward adds up each
rank's own whole gradient and communicates nothing. In the optimizer step the gradients are reduced to their
owners (a reduce-scatter, then / N), each owner updates its shard, and the new shards are all-gathered.
Costs M_P + M_G + M_O / N on every rank, and (N-1)/N (M_G + M_P) sent by each rank in a step: what DDP's
all-reduce sends, cut in two. API: ``torch.distributed``. Paper: ZeRO (arXiv 1910.02054), P_os.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chapter19_9.strategies import shards
from chapter19_9.strategies.ring import How, reduce_scatter
from chapter19_9.strategies.shards import Flat, Group, flats_of, full_state_dict, gathered, load_full

__all__ = ["full_state_dict", "gathered", "gradient_parts", "load_full", "optimizer", "shard"]


class Whole(Flat):
    """A flat vector of which every rank keeps the whole: the model's parameters are views of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.averaged: Tensor | None = None
        self.whole = self.packed().to(self.dtype)
        if self.dtype == torch.float32:
            self.shard.data = self.layout.own(self.whole)  # the same memory; else a float32 copy beside it
        for entry, view in zip(self.entries, self.layout.unpack(self.whole), strict=True):
            entry.parameter.data = view

    def gradient(self) -> Tensor | None:
        return self.averaged

    @torch.no_grad()
    def average(self, part: Tensor, whole: Tensor) -> Tensor:
        """``part``: this rank's part of the mean of the ranks' whole gradients."""
        reduce_scatter(part, whole, self.how)
        return part.div_(self.layout.n)

    @torch.no_grad()
    def refresh(self, async_op: bool = False) -> Any:
        own = self.layout.own(self.whole)
        if self.dtype != torch.float32:
            own.copy_(self.shard)
        return shards.all_gather(self.whole, own, async_op)


class WholeGradient(Whole):
    """With the whole gradient beside it: the parameters' gradients are views of it, and backward adds to them.

    A parameter that forward does not use has zeros there, and is decayed like the others.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.whole_gradient = torch.zeros_like(self.whole)
        for entry, view in zip(self.entries, self.layout.unpack(self.whole_gradient), strict=True):
            entry.parameter.grad = view

    def finish(self) -> None:
        """After the last backward, once: each owner's part of the gradient becomes the average."""
        if self.averaged is None:
            self.averaged = self.average(self.layout.own(self.whole_gradient), self.whole_gradient)

    def clear(self) -> None:
        self.averaged = None
        self.whole_gradient.zero_()


class ShardedOptimizer:
    """Trains this rank's shards with an ordinary optimizer, ``optim``, then brings every rank the whole new weights.

    A learning-rate scheduler is given ``optim``.
    """

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.flats: list[Any] = flats_of(model)
        self.optim, self.param_groups = optim, optim.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """What this rank keeps for the optimizer: its states, and the float32 weights where they are a copy."""
        copies = {flat: flat.shard.detach() for flat in self.flats if flat.dtype != torch.float32}
        return {**self.optim.state, **copies}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; the memory for whole ones is kept in any case."""
        for flat in self.flats:
            flat.clear()

    def step(self) -> None:
        """Average what is not averaged yet, update the shards, all-gather them. Every rank must call it."""
        for flat in self.flats:
            flat.finish()
            flat.shard.grad = flat.averaged.float()
        self.optim.step()
        for flat in self.flats:
            flat.shard.grad = None
        for work in [
            flat.refresh(async_op=True) for flat in self.flats
        ]:  # all are on their way before one is waited for
            if work:
                work.wait()


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype | str = torch.float32,
    group: Group | None = None,
    reduce_scatter: How = "auto",
) -> nn.Module:
    """Lay the trained parameters of each unit end to end. The model stays itself, frozen parameters as they are.

    dtype: what forward and backward compute in; the optimizer's shards are float32 in any case. group: label
    of the optimizer's parameter group for (name, parameter). reduce_scatter: see ``ring``.
    """
    shards.broadcast(model.to(device))
    dtype = shards.element_type(dtype)
    make = partial(WholeGradient, dtype=dtype, how=reduce_scatter)
    shards.flatten(model, make, shards.blocks(model), group)
    return model.to(dtype)  # what is not in the flat vectors


def optimizer(model: nn.Module, lr: float, **options: Any) -> ShardedOptimizer:
    """AdamW with torch's defaults, or what ``options`` say: see ``shards.optimizer``."""
    return ShardedOptimizer(model, shards.optimizer(model, lr, **options))


def gradient_parts(model: nn.Module) -> list[Tensor]:
    """This rank's parts of the averaged gradient, averaged now if they were not yet. Every rank must call it."""
    for flat in flats_of(model):
        assert isinstance(flat, WholeGradient)
        flat.finish()
    return shards.gradient_parts(model)
