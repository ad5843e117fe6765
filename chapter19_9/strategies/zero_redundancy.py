"""DDP with ZeroRedundancyOptimizer: PyTorch's ZeRO-1 style.

Shards the optimizer states, by whole tensors: each goes to the rank that has the fewest elements so far, the
largest first, so that shares are uneven. DDP's all-reduce has averaged and reduced all gradients to every rank
in backward; in the optimizer step each rank updates its tensors, and each tensor is broadcast from its rank.
Costs M_P + M_G + about M_O / N on every rank, and (N-1)/N (2 M_G + M_P) sent by each rank in a step: half as much
again as ZeRO-1 needs. API: ``torch.distributed.optim.ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from chapter19_9.strategies.ddp import accumulating, shard

__all__ = ["accumulating", "optimizer", "shard"]


def optimizer(model: nn.Module, lr: float) -> ZeroRedundancyOptimizer:
    """AdamW with torch's defaults over the tensors that are this rank's."""
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr, fused=True)
