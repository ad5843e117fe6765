"""What DistributedSampler does quietly, and how to see or undo it: empty parts, and repeats that pad the
last ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler


def check_sampler(sampler: DistributedSampler) -> DistributedSampler:
    """The sampler itself. ValueError when it gives this rank no sample: a mean over none is nan, and nobody
    says so."""
    if len(sampler) == 0:
        size = len(sampler.dataset)  # type: ignore[arg-type]
        how = " with drop_last=True" if sampler.drop_last else ""
        raise ValueError(f"a dataset of {size} samples over {sampler.num_replicas} ranks{how} leaves each rank none")
    return sampler


def distinct_mean(values: Iterable[float], indices: Iterable[int]) -> float:
    """The mean over the distinct samples of all ranks: one value for each sample, however often it was drawn.

    values, indices : this rank's value for each sample that it drew, and that sample's index in the
                      dataset. Every rank must
        call it. Raises ValueError when they differ in number, or when no rank has any.
    """
    mine = list(zip(map(int, indices), map(float, values), strict=True))
    everyones = [mine]
    if dist.is_initialized():
        everyones = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, mine)
    distinct = {index: value for part in everyones for index, value in part}
    if not distinct:
        raise ValueError("values is empty on every rank: there is no mean")
    return sum(distinct.values()) / len(distinct)
