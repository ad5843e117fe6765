"""DistributedDataParallel: everything is copied, gradients are averaged.

Shards nothing. When the model is wrapped, rank 0's parameters and buffers are broadcast, so all start
alike. In backward, gradients that are ready are gathered in buckets and each bucket is all-reduced while
backward goes on; the optimizer step is each rank's own. Costs M_P + M_G + M_O on every rank, and 2(N-1)/N
M_G sent by each rank in a step. API: ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chapter19_9.strategies.shards import check_plain


def shard(model: nn.Module, device: torch.device, bucket_mb: float | None = None) -> DistributedDataParallel:
    """Wrap the model. ``bucket_mb``: bucket size in MiB; DDP's own is 1 for the first bucket and 25 for the
    others."""
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb!r}: it must be above 0")
    check_plain(model)
    return DistributedDataParallel(
        model.to(device),
        # a module on the CPU must not be given any
        device_ids=None if device.type == "cpu" else [device],
        bucket_cap_mb=bucket_mb,
        # gradients live inside the buckets: otherwise both exist, and M_G is held twice
        gradient_as_bucket_view=True,
    )


def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with torch's defaults: an ordinary optimizer over the whole model, the same on every rank."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def accumulating(model: DistributedDataParallel) -> AbstractContextManager[None]:
    """Backward inside it adds to the gradients without averaging them. Forward has to be inside as well."""
    return model.no_sync()
