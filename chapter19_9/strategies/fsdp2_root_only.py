"""FSDP2 applied to the root alone: the mistake of leaving the blocks out.

Shards parameters, gradients and optimizer states at rest, as ``fsdp2`` does, but the model is a single unit: all
weights are all-gathered at once before forward, stay until the end of backward, and all gradients are whole
until they are reduced together. Costs (M_P + M_G + M_O) / N on every rank at rest, M_P + M_G at the peak, and
(N-1)/N (M_P + M_G) sent by each rank in a step. API: ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import fsdp2
from chapter19_9.strategies.fsdp2 import accumulating, gathered, gradient_parts, optimizer

__all__ = ["accumulating", "gathered", "gradient_parts", "optimizer", "shard"]


def shard(model: nn.Module, device: torch.device, *, dtype: torch.dtype | str = torch.float32) -> nn.Module:
    """Shard the model in place. ``dtype``: as in ``fsdp2``."""
    return fsdp2.shard(model, device, units=False, root=None, dtype=dtype)
