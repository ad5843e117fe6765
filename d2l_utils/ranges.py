"""The bytes of storages that tensors cover: what is tied, aliased or overlapping counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

Range = tuple[int, int, int]  # a storage, and the bytes of it from .. to


# The methods that give a compressed sparse tensor's indices.
INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"), torch.sparse_bsc: ("ccol_indices", "row_indices"),
}  # fmt: skip


def in_memory(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage of their own that this one is made of on this rank; of an ordinary one itself.

    A sharded tensor (DTensor) is its local part, a sparse one its indices and values, a wrapper what it wraps. A tensor
    on the meta device, and a lazy module's before its first forward, have no memory: none. Raises TypeError for one
    whose memory PyTorch does not show (MKL-DNN's).
    """
    local = getattr(tensor, "_local_tensor", tensor)
    if is_lazy(local) or local.is_meta:
        return
    if type(local) in (Tensor, Parameter) and local.layout is torch.strided:  # nearly all: asked for at every sample
        yield local
        return
    if local.layout is torch.sparse_coo:
        parts = [local._indices(), local._values()]
    elif names := INDICES.get(local.layout):
        parts = [*(getattr(local, name)() for name in names), local.values()]
    elif hasattr(local, "__tensor_flatten__"):
        parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
    elif local.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"a tensor of layout {local.layout} does not show its memory: its bytes cannot be counted")
    else:
        yield local
        return
    for part in parts:
        yield from in_memory(part)


def span(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last one in memory."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def union(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes covered by any of the ranges."""
    covered, end = 0, 0
    for first, last in sorted(ranges):
        covered += max(0, last - max(first, end))
        end = max(end, last)
    return covered


def byte_range(tensor: Tensor) -> set[Range]:
    """The bytes that the local part of a tensor covers; none when it has no memory, or its storage was freed."""
    found = set()
    for part in in_memory(tensor):
        storage, item = part.untyped_storage(), part.element_size()
        first = int(part.storage_offset()) * item
        last = min(first + span(part) * item, storage.nbytes())
        if last > first:
            found.add((storage._cdata, first, last))
    return found


def covered(ranges: Iterable[Range]) -> int:
    """Bytes in at least one of the ranges."""
    together: dict[int, list[tuple[int, int]]] = {}
    for storage, first, last in ranges:
        together.setdefault(storage, []).append((first, last))
    return sum(map(union, together.values()))
