"""Each rank alone: the plain model and a plain optimizer.

Shards nothing and communicates nothing. With one rank it is the reference that every other strategy is held
against; with more, the ranks' weights drift apart as soon as their data differ. Costs M_P + M_G + M_O on
every rank. API: ``torch.optim.AdamW``.
"""

from __future__ import annotations

import torch
from torch import nn


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself, on ``device``."""
    return model.to(device)


def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, fused: one operator updates everything in place, on a CPU as on a GPU."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
