"""Reduce-scatter, three ways: rank r ends with the sum over the ranks of the r-th of N equal parts.

``ring``    : N-1 rounds; in each, a rank passes a part that it has added to on to its right neighbour.
``direct``  : each rank sends every other rank that rank's part, all at once: one round, for small tensors.
``backend`` : the backend's own. NCCL's is a ring too; gloo has none, runs an all-reduce and keeps a part.

The first two send (N-1)/N of the tensor from each rank, the least there is, with any backend that can send.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

How = Literal["auto", "ring", "direct", "backend"]


def reduce_scatter(part: Tensor, whole: Tensor, how: How = "auto") -> None:
    """Put the sum of the ranks' r-th part of ``whole`` into rank r's ``part``. Every rank must call it.

    part: (n,), whole: (N n,), contiguous, left as it is; ``part`` may be the r-th part of ``whole``. "auto"
    is the ring where gloo carries the tensor, the backend's own elsewhere. Raises ValueError for another ``how``.
    """
    if how not in get_args(How):
        raise ValueError(f"reduce_scatter is {how!r}: it must be one of {', '.join(get_args(How))}")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        part.copy_(whole)
        return
    if how == "auto":
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # by type of device
        how = "ring" if backends.get(whole.device.type) == "gloo" else "backend"
    {"ring": _ring, "direct": _direct, "backend": _backend}[how](part, whole)


def _ring(part: Tensor, whole: Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    passed_on = parts[left]  # it visits all ranks and comes home to its owner last
    for step in range(n - 1):
        received = torch.empty_like(part)
        _exchange([(passed_on, right)], [(received, left)])
        passed_on = received.add_(parts[(rank - step - 2) % n])
    part.copy_(passed_on)


def _direct(part: Tensor, whole: Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(n)
    others = [(rank + step) % n for step in range(1, n)]
    received = {other: torch.empty_like(part) for other in others}
    _exchange([(parts[other], other) for other in others], [(received[other], other) for other in reversed(others)])
    total = parts[rank].clone()
    for other in sorted(others):
        total += received[other]
    part.copy_(total)


def _backend(part: Tensor, whole: Tensor) -> None:
    # gloo must not be given a part of its own input
    result = torch.empty_like(part)
    # torch 2.13 renamed it, and warns about the old name
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(result, whole)
    part.copy_(result)


def _exchange(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
    """Send to and receive from other ranks at the same time, and wait for all of it."""
    operations = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
