"""DeepSpeed stage 1: parameters are copied, the optimizer is sharded, and a second copy of the weights with it.

Shards the optimizer states: the model is one flat vector, padded to N shards of an even length, and the optimizer
trains a copy of this rank's shard, in float32 also where the weights are. After the last backward, gradients are reduced
bucket by bucket and those of other ranks' shards are freed: whole ones exist in backward only. In the optimizer step
each rank updates its shard and the new shards are all-gathered. Costs M_P + (M_P + M_O) / N at rest, and between
backward and step the gradients of each tensor that its shard touches: a little more than M_G / N.
By default a bucket is reduced by an all-reduce, since one bucket has several owners: (N-1)/N (2 M_G + M_P) sent by each
rank in a step, half as much again as ZeRO-1 needs. ``owners=True`` reduces to each owner instead: (N-1)/N (M_G + M_P).
API: ``deepspeed.initialize``. Paper: ZeRO (arXiv 1910.02054), P_os.
"""

from __future__ import annotations

import torch
from torch import nn

from chapter19_9.strategies import deepspeed
from chapter19_9.strategies.deepspeed import accumulating, backward, gathered, gradient_parts, optimizer

__all__ = ["accumulating", "backward", "gathered", "gradient_parts", "optimizer", "shard"]


def shard(
    model: nn.Module, device: torch.device, *, bucket_mb: float | None = None, owners: bool = False, stage: int = 1
) -> nn.Module:
    """Make the engine. ``bucket_mb`` as in ``deepspeed.engine``; ``owners``: reduce to each owner by itself."""
    # the loop takes the norm itself, as with all strategies
    settings = {"use_multi_rank_bucket_allreduce": not owners, "compute_grad_norm": False}
    return deepspeed.engine(model, device, stage, bucket_mb, **settings)
