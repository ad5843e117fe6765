"""The bytes of storages that tensors cover: what is tied, aliased or overlapping counts once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Range = tuple[int, int, int]  # a storage, and the bytes of it from .. to


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
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_meta:
        return set()
    storage, item = local.untyped_storage(), local.element_size()
    first = int(local.storage_offset()) * item
    last = min(first + span(local) * item, storage.nbytes())
    return {(storage._cdata, first, last)} if last > first else set()


def covered(ranges: Iterable[Range]) -> int:
    """Bytes in at least one of the ranges."""
    together: dict[int, list[tuple[int, int]]] = {}
    for storage, first, last in ranges:
        together.setdefault(storage, []).append((first, last))
    return sum(map(union, together.values()))
