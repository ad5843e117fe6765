"""FSDP1: the wrapper FullyShardedDataParallel, to read existing code with; new code uses FSDP2.

Shards parameters, gradients and optimizer states, unit by unit: each block is wrapped, and what is left is in the
outermost wrapper. A unit's parameters are one flat vector, each tensor at a multiple of 16 bytes, padded to N
equal shards. With FULL_SHARD a block's weights are all-gathered before forward, freed after it and all-gathered
again before backward (the outermost wrapper's stay); its gradients are reduced to shards after its backward.
Costs (M_P + M_G + M_O) / N on every rank at rest, and (N-1)/N (2 M_P + M_G) sent by each rank in a step, less
one all-gather of the outermost unit. API: ``torch.distributed.fsdp.FullyShardedDataParallel``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from chapter19_9.strategies.fsdp2 import full_state_dict, load_full
from chapter19_9.strategies.shards import blocks, broadcast, element_type

__all__ = ["accumulating", "full_state_dict", "gathered", "gradient_parts", "load_full", "optimizer", "shard"]


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    sharding: str = "FULL_SHARD",
    wrap: list[type[nn.Module]] | None = None,
    dtype: torch.dtype | str = torch.float32,
) -> FullyShardedDataParallel:
    """Wrap the model.

    sharding: name of a ShardingStrategy. wrap: classes of the modules that become units; default the class
    of the blocks, an empty list wraps the model as a whole. dtype: what weights are gathered and computed in;
    shards are float32, and gradients are reduced in it. Raises ValueError when tied weights would be
    in two units.
    """
    broadcast(model.to(device))  # sync_module_states=True would, but not on the CPU
    classes = {type(model.get_submodule(name)) for name in blocks(model)} if wrap is None else set(wrap)
    check_tied(model, classes)
    with warnings.catch_warnings():
        # one rank: it says that nothing is sharded; the figures do too
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[sharding],
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=MixedPrecision(element_type(dtype), torch.float32, element_type(dtype)),
            device_id=device,  # on the CPU as well: else it asks for an accelerator
            use_orig_params=True,  # frozen and trained parameters in one unit
        )


def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with torch's defaults: an ordinary optimizer, made after ``shard``, over local shards."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def accumulating(model: FullyShardedDataParallel) -> AbstractContextManager[None]:
    """Backward inside it keeps whole gradients and reduces nothing."""
    return model.no_sync()


def gradient_parts(model: nn.Module) -> list[Tensor]:
    """This rank's parts of the averaged gradients."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def gathered(model: Any, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each whole parameter or gradient. Every rank must go through all of them."""
    whole = FullyShardedDataParallel.summon_full_params(model, with_grads=gradients, writeback=False)
    with whole:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad or not gradients]
        # a frozen parameter shows zeros as its gradient: it lies in the same flat vector
        copies = [
            (name, tensor.clone()) for name, p in trained if (tensor := p.grad if gradients else p.detach()) is not None
        ]
    yield from copies


def check_tied(model: nn.Module, classes: set[type[nn.Module]]) -> None:
    """ValueError when one parameter is used by two units: FSDP1 would fail deep in forward, or train it twice."""
    units = [name for name, module in model.named_modules() if name and type(module) in classes]
    users: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
        other, first = users.setdefault(id(parameter), (unit, name))
        if unit != other:
            raise ValueError(
                f"{first!r} and {name!r} are one tied weight in two units, {other or 'the model'!r} and "
                f"{unit or 'the model'!r}: choose wrap so that one unit has both"
            )
