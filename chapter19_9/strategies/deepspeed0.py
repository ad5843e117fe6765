"""DeepSpeed stage 0: everything is copied, gradients are averaged; DDP's mathematics without its overlap.

Shards nothing. When the engine is made, rank 0's parameters are broadcast. After backward, all gradients are laid
end to end and reduced by one all-reduce, then / N; with accumulation after the last backward only. Costs
M_P + M_G + M_O on every rank, and 2(N-1)/N M_G sent by each rank in a step. API: ``deepspeed.initialize``.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import deepspeed
from chapter19_9.strategies.deepspeed import accumulating, backward, optimizer

__all__ = ["accumulating", "backward", "optimizer", "shard"]


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Make the engine."""
    return deepspeed.engine(model, device, stage=0)
