"""FSDP2 that keeps weights from forward to backward: ``reshard_after_forward=False``, the ZeRO-2 style.

Shards parameters, gradients and optimizer states at rest, as ``fsdp2`` does. A unit's weights are all-gathered
before its forward and stay until its backward is done and its gradients are reduced: at the end of forward
every rank has the whole model. Costs (M_P + M_G + M_O) / N on every rank at rest, and (N-1)/N (M_P + M_G) sent
by each rank in a step. API: ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import fsdp2
from chapter19_9.strategies.fsdp2 import accumulating, gathered, gradient_parts, optimizer

__all__ = ["accumulating", "gathered", "gradient_parts", "optimizer", "shard"]


def shard(model: nn.Module, device: torch.device, *, dtype: torch.dtype | str = torch.float32) -> nn.Module:
    """Shard the model in place. ``dtype``: as in ``fsdp2``."""
    return fsdp2.shard(model, device, reshard_after_forward=False, dtype=dtype)
