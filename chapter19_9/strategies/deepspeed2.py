"""DeepSpeed stage 2: only parameters are copied; gradients and optimizer are sharded.

Shards gradients and optimizer states as ``deepspeed1`` lays them out. As soon as backward has filled a bucket with
gradients it is reduced, and those of other ranks' shards are freed; with accumulation in every backward. Costs
M_P + (M_G + M_P + M_O) / N on every rank, the gradients being those of each tensor that its shard touches, and
by default (N-1)/N (2 M_G + M_P) sent by each rank in a step, as ``deepspeed1`` says. API: ``deepspeed.initialize``.
Paper: ZeRO (arXiv 1910.02054), P_os+g.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import deepspeed1
from chapter19_9.strategies.deepspeed import accumulating, backward, gathered, gradient_parts, optimizer

__all__ = ["accumulating", "backward", "gathered", "gradient_parts", "optimizer", "shard"]


def shard(model: nn.Module, device: torch.device, *, bucket_mb: float | None = None, owners: bool = False) -> nn.Module:
    """Make the engine. Settings as in ``deepspeed1``."""
    return deepspeed1.shard(model, device, bucket_mb=bucket_mb, owners=owners, stage=2)
