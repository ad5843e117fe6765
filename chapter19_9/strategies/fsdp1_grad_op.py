"""FSDP1 that keeps weights from forward to backward: SHARD_GRAD_OP, the ZeRO-2 style.

Shards parameters, gradients and optimizer states at rest, as ``fsdp1`` does. A unit's weights are all-gathered
before its forward and stay until its backward is done and its gradients are reduced. Costs
(M_P + M_G + M_O) / N on every rank at rest, and (N-1)/N (M_P + M_G) sent by each rank in a step; while gradients
accumulate in ``no_sync`` the weights stay whole between passes as well.
API: ``torch.distributed.fsdp.FullyShardedDataParallel``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from chapter19_9.strategies import fsdp1
from chapter19_9.strategies.fsdp1 import accumulating, gathered, gradient_parts, optimizer

__all__ = ["accumulating", "gathered", "gradient_parts", "optimizer", "shard"]


def shard(
    model: nn.Module, device: torch.device, *, dtype: torch.dtype | str = torch.float32
) -> FullyShardedDataParallel:
    """Wrap the model. ``dtype``: as in ``fsdp1``."""
    return fsdp1.shard(model, device, sharding="SHARD_GRAD_OP", dtype=dtype)
