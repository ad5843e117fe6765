"""DeepSpeed stage 3: parameters, gradients and optimizer are sharded, each tensor by itself.

Shards parameters, gradients and optimizer states: each tensor is padded to N equal shards, and the optimizer trains a
copy of this rank's. A module's weights are all-gathered before its own forward, freed after it and all-gathered again
before its backward; a tensor that two modules use is gathered for each. Gradients are reduced to shards bucket by
bucket in backward (reduce-scatter). Costs (M_P + M_G + M_P + M_O) / N on every rank at rest, and (N-1)/N (2 M_P + M_G)
sent by each rank in a step, and 8 bytes of norm all-reduced; with accumulation all but the norm in every backward.
Its first two steps also compare the order of modules among the ranks. API: ``deepspeed.initialize``.
Paper: ZeRO (arXiv 1910.02054), P_os+g+p.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import deepspeed
from chapter19_9.strategies.deepspeed import (
    accumulating,
    backward,
    gathered,
    gradient_parts,
    optimizer,
    parameter_parts,
    standing,
)

__all__ = [
    "accumulating",
    "backward",
    "gathered",
    "gradient_parts",
    "optimizer",
    "parameter_parts",
    "shard",
    "standing",
]


def shard(model: nn.Module, device: torch.device, *, bucket_mb: float | None = None) -> nn.Module:
    """Make the engine. ``bucket_mb`` as in ``deepspeed.engine``."""
    # no tensor is too small to shard, none is kept because it will be used again soon, none comes early
    nothing = ("param_persistence_threshold", "max_reuse_distance", "max_live_parameters", "prefetch_bucket_size")
    return deepspeed.engine(model, device, 3, bucket_mb, **{f"stage3_{name}": 0 for name in nothing})
