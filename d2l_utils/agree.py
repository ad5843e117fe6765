"""Do the ranks hold the same tensors? Asked with a digest of the exact bytes, or answered with the largest
difference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

Tensors = nn.Module | Iterable[Tensor]


def digest(tensors: Tensors) -> bytes:
    """SHA-256 of shapes, types and exact bytes: a module's parameters, or the tensors given. 32 bytes."""
    sha = hashlib.sha256()
    for tensor in _listed(tensors):
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().contiguous().reshape(-1)
        sha.update(memoryview(flat.view(torch.uint8).cpu().numpy()))
    return sha.digest()


def ranks_agree(tensors: Tensors, group: dist.ProcessGroup | None = None) -> bool:
    """True when every rank of ``group`` holds the same bytes. Moves 32 bytes a rank. Every rank must call
    it, and every rank gets the same answer. Without a process group there is one rank, which agrees with
    itself.
    """
    return len(set(_gathered(digest(tensors), tensors, group))) == 1


def largest_difference(tensors: Tensors, group: dist.ProcessGroup | None = None) -> float:
    """The largest absolute difference between two ranks' values of one element; nan when any value is not
    finite.

    Every rank must call it, and every rank gets the same answer. It moves the tensors themselves, twice.
    Raises ValueError when the ranks hold tensors of different shapes.
    """
    tensors = _listed(tensors)
    shapes = hashlib.sha256(repr([tuple(tensor.shape) for tensor in tensors]).encode()).digest()
    if len(set(_gathered(shapes, tensors, group))) > 1:
        raise ValueError("tensors have different shapes on different ranks")
    if not tensors or not dist.is_initialized():
        return 0.0
    values = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    # in one vector: the highest values, and the negatives of the lowest; a backend's MAX may drop a nan
    ends = torch.cat([values, -values]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = ends.chunk(2)
    difference = (highest + lowest).max().item() if ends.numel() else 0.0
    return difference if difference < float("inf") else float("nan")


def relative_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """||one - other|| / ||other||, 2-norms over all tensors as one vector, by name. Local: no rank is asked.

    Raises ValueError when the names differ, or other is all zeros.
    """
    if one.keys() != other.keys():
        raise ValueError(f"names differ: {sorted(one.keys() ^ other.keys())[:5]}")
    difference = sum((one[name].double() - tensor.double()).square().sum().item() for name, tensor in other.items())
    size = sum(tensor.double().square().sum().item() for tensor in other.values())
    if not size:
        raise ValueError("other is all zeros: there is nothing to be relative to")
    return (difference / size) ** 0.5


def _listed(tensors: Tensors) -> list[Tensor]:
    return list(tensors.parameters() if isinstance(tensors, nn.Module) else tensors)


def _gathered(mine: bytes, tensors: Tensors, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's 32 bytes."""
    if not dist.is_initialized():
        return [mine]
    devices = [tensor.device for tensor in _listed(tensors)]
    # the backend's own device, also when there is no tensor to ask
    device = devices[0] if devices else torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [bytes(part.tolist()) for part in received]
