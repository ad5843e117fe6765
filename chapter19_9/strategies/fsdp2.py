"""FSDP2: ``fully_shard`` makes every parameter a DTensor; the module stays itself.

Shards parameters, gradients and optimizer states, each tensor by its rows: rank r has the r-th of N chunks of
dimension 0, which may be smaller than the others', or empty. Applied bottom-up: each block is a unit, and so
is what is left in the root. A unit's weights are all-gathered before forward and, when
``reshard_after_forward``, freed after it and all-gathered again before backward; its gradients are reduced to
shards after its backward. Costs (M_P + M_G + M_O) / N on every rank at rest, and (N-1)/N (2 M_P + M_G) sent by
each rank in a step. API: ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from chapter19_9.strategies.shards import blocks, broadcast, element_type, place


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    reshard_after_forward: bool = True,
    root: bool | str | None = "same",
    units: bool = True,
    dtype: torch.dtype | str = torch.float32,
) -> nn.Module:
    """Shard the model in place. On the meta device it stays there, without memory, until ``to_empty`` gives it some.

    reshard_after_forward: free a unit's weights between its forward and its backward. root: the same for the
    root unit; "same" as the others, None for what PyTorch does by default. units: False shards the root only.
    dtype: what weights are gathered and computed in; shards are float32, and gradients are reduced in it.
    """
    if not next(model.parameters()).is_meta:
        broadcast(model.to(device))  # fully_shard keeps each rank's own weights
    mesh = init_device_mesh(device.type, (place()[1],))
    policy = MixedPrecisionPolicy(param_dtype=element_type(dtype), reduce_dtype=torch.float32)
    if units:
        for name in blocks(model):
            fully_shard(
                model.get_submodule(name), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
    kept: Any = reshard_after_forward if root == "same" else root
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
    return model


def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, made after ``shard``, over DTensors: an ordinary optimizer."""
    # fused: one operator for all parameters, where DTensor would work out a dozen for each shape
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


@contextmanager
def accumulating(model: Any) -> Iterator[None]:
    """Backward inside it keeps whole gradients and reduces nothing."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def gradient_parts(model: nn.Module) -> list[Tensor]:
    """This rank's rows of the averaged gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]


def gathered(model: nn.Module, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each whole parameter or gradient, one at a time. Every rank must go through all."""
    for name, parameter in model.named_parameters():
        tensor: Any = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            yield name, tensor.full_tensor()


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded model's state dict on the CPU of rank 0; {} on the others. Every rank must call it."""
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return state


def load_full(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a sharded model the weights of an unsharded one. Every rank must call it, with the same state dict."""
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
