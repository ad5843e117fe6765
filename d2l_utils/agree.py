"""Do the ranks hold the same tensors? Asked with a digest of the exact bytes, or answered with the largest
difference.

Tensors may be dense, sparse, quantised, nested or sharded (DTensor), of any element type. Of a DTensor the whole is
compared, as this rank gathers it: what only one rank holds cannot differ, replicas can. A tensor without values, a lazy
module's before its first forward or one on the meta device, cannot be compared: ValueError says so, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from d2l_utils.ranges import INDICES

Tensors = nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]
Named = list[tuple[str, Tensor]]

_NONE = bytes(32)  # what a rank sends that has no answer


def digest(tensors: Tensors) -> bytes:
    """SHA-256 of shapes, types and exact bytes: a module's parameters and buffers, or the tensors given. 32 bytes.

    Local, except for DTensors, which every rank gathers. Raises ValueError for a tensor without values.
    """
    sha = hashlib.sha256()
    for name, tensor in _named(tensors):
        parts = _tried(_exact, name, tensor)
        sha.update(f"{_shape(tensor)} {tensor.dtype};".encode())
        for part in parts:
            sha.update(memoryview(part.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))
    return sha.digest()


def ranks_agree(tensors: Tensors, group: dist.ProcessGroup | None = None) -> bool:
    """True when every rank of ``group`` holds the same bytes. Moves 32 bytes a rank, and DTensors. Every rank must
    call it, and every rank gets the same answer. Without a process group there is one rank, which agrees with
    itself.

    Of a module both parameters and buffers count, such as BatchNorm's running statistics: give
    ``model.parameters()`` to compare those alone. Raises ValueError on every rank when one has a tensor without values.
    """
    named = _named(tensors)
    return len(set(_gathered(lambda: digest(dict(named)), named, group))) == 1


def largest_difference(tensors: Tensors, group: dist.ProcessGroup | None = None) -> float:
    """The largest absolute difference between two ranks' values of one element; nan when any value is not
    finite. Of a module both parameters and buffers count.

    Integers and float64 are compared as they are, complex numbers by the length of their difference. Every rank
    must call it, and every rank gets the same answer. It moves the tensors themselves: twice, complex ones once
    for each rank. Sparse ones are made dense.
    Raises ValueError on every rank when the ranks hold tensors of different shapes or types, or one has a tensor
    without values.
    """
    named = _named(tensors)
    # half of the bytes for each question
    shapes_and_types = _gathered(
        lambda: _hashed(_shape(tensor) for _, tensor in named) + _hashed(tensor.dtype for _, tensor in named),
        named,
        group,
    )
    for half, what in ((slice(16), "shapes"), (slice(16, 32), "types")):
        if len({seen[half] for seen in shapes_and_types}) > 1:
            raise ValueError(f"tensors have different {what} on different ranks")
    if not named or not dist.is_initialized():
        return 0.0
    device = _device(named, group)
    together: dict[torch.dtype, list[Tensor]] = {}
    for name, tensor in named:
        values = _tried(_comparable, name, tensor)
        together.setdefault(values.dtype, []).append(values.reshape(-1).to(device))
    worst = max(_DIFFERENCE[dtype](torch.cat(parts), group) for dtype, parts in together.items())
    return worst if worst < float("inf") else float("nan")


def relative_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """||one - other|| / ||other||, 2-norms over all tensors as one vector, by name, in float64. No rank is asked,
    except for DTensors, which every rank gathers.

    Raises ValueError when the names or shapes differ, other is all zeros, or a tensor has no values.
    """
    if one.keys() != other.keys():
        raise ValueError(f"names differ: {sorted(one.keys() ^ other.keys())[:5]}")
    difference = size = 0.0
    for name, theirs in other.items():
        mine, reference = (_tried(_precise, name, tensor) for tensor in (one[name], theirs))
        if mine.shape != reference.shape:
            raise ValueError(f"{name} has shape {tuple(mine.shape)} in one and {tuple(reference.shape)} in other")
        difference += (mine - reference).abs().square().sum().item()
        size += reference.abs().square().sum().item()
    if not size:
        raise ValueError("other is all zeros: there is nothing to be relative to")
    return float((difference / size) ** 0.5)


# Tensors


def _named(tensors: Tensors) -> Named:
    """(name, tensor)"""
    if isinstance(tensors, nn.Module):
        return [*tensors.named_parameters(), *tensors.named_buffers()]
    if isinstance(tensors, Tensor):
        return [("the tensor", tensors)]
    if isinstance(tensors, Mapping):
        return list(tensors.items())
    return [(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)]


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_nested:
        return tuple(tuple(part.shape) for part in tensor.unbind())
    return tuple(tensor.shape)


def _check_values(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name} has no values yet: a lazy module gets them in its first forward")
    if tensor.is_meta:
        raise ValueError(f"{name} has no values: it is on the meta device")


def _tried[T](function: Callable[[Tensor], T], name: str, tensor: Tensor) -> T:
    """``function`` of a tensor; a ValueError in plain words where the tensor is of a kind that cannot be compared."""
    _check_values(name, tensor)
    whole: Any = tensor.detach()
    if hasattr(whole, "full_tensor"):  # this moves data: an error in it says nothing about the kind of tensor
        whole = whole.full_tensor()
    try:
        return function(whole)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        what = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        raise ValueError(f"{name} cannot be compared: PyTorch does not give the values of {what}") from error


def _exact(tensor: Tensor) -> list[Tensor]:
    """Dense tensors that together hold all that makes up this one; of a dense tensor itself."""
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        tensor = tensor.to_dense()
    if tensor.is_nested:
        return [part for member in tensor.unbind() for part in _exact(member)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), *_exact(tensor.values())]
    if indices := INDICES.get(tensor.layout):
        return [*(getattr(tensor, name)() for name in indices), *_exact(tensor.values())]
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = torch.tensor([tensor.q_scale(), float(tensor.q_zero_point())], dtype=torch.float64)
            return [tensor.int_repr(), scale]
        return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return [tensor.resolve_conj().resolve_neg()]


def _dense(tensor: Tensor) -> Tensor:
    """The same values as a dense tensor."""
    if tensor.is_nested:
        return torch.cat([_dense(member).reshape(-1) for member in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()


def _comparable(tensor: Tensor) -> Tensor:
    """Its values in the smallest of the types in which differences are taken."""
    values = _dense(tensor)
    if values.dtype is torch.uint64:  # the same order in numbers with a sign
        return values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if values.is_complex():
        return values.to(torch.complex128)
    if values.is_floating_point():
        return values if values.dtype is torch.float64 else values.float()
    return values.to(torch.int64)


def _precise(tensor: Tensor) -> Tensor:
    values = _dense(tensor)
    return values.to(torch.complex128) if values.is_complex() else values.double()


# What two ranks' values differ by


def _float_difference(values: Tensor, group: Any) -> float:
    # in one vector: the highest values, and the negatives of the lowest; a backend's MAX may drop a nan
    ends = torch.cat([values, -values]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = ends.chunk(2)
    return (highest + lowest).max().item() if ends.numel() else 0.0


def _integer_difference(values: Tensor, group: Any) -> float:
    ends = torch.cat([values, ~values])  # ~v is -v - 1, which every v has
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = ends.chunk(2)
    apart = highest - ~lowest
    if (apart < 0).any():  # it is 2**63 or more, and went around
        return float(int(apart[apart < 0].max()) + 2**64)
    return float(int(apart.max())) if apart.numel() else 0.0


def _complex_difference(values: Tensor, group: Any) -> float:
    worst = torch.zeros(1, dtype=torch.float64, device=values.device)
    for rank in range(dist.get_world_size(group)):
        theirs = torch.view_as_real(values).clone()
        dist.broadcast(theirs, src=rank if group is None else dist.get_global_rank(group, rank), group=group)
        apart = (values - torch.view_as_complex(theirs)).abs().nan_to_num(nan=torch.inf)
        worst = torch.maximum(worst, apart.max()) if apart.numel() else worst
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.item()


_DIFFERENCE: dict[torch.dtype, Callable[[Tensor, Any], float]] = {
    torch.float32: _float_difference,
    torch.float64: _float_difference,
    torch.int64: _integer_difference,
    torch.complex128: _complex_difference,
}


# Asking the ranks


def _hashed(values: Iterable[object]) -> bytes:
    return hashlib.sha256(repr(list(values)).encode()).digest()[:16]


def _gathered(answer: Callable[[], bytes], named: Named, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's 32 bytes. Where one rank raises ValueError instead of an answer, all do."""
    mine, error = _NONE, None
    try:
        for name, tensor in named:
            _check_values(name, tensor)
        mine = answer()
    except ValueError as raised:  # the others wait for an answer
        error = raised
    answers = [mine]
    if dist.is_initialized():
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_device(named, group))
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(received, sent, group=group)
        answers = [bytes(part.tolist()) for part in received]
    if error is not None:
        raise error
    if _NONE in answers:
        raise ValueError(f"tensors of rank {answers.index(_NONE)} cannot be compared: see its own error")
    return answers


def _device(named: Named, group: dist.ProcessGroup | None) -> torch.device:
    """Where the group takes tensors: the first tensor's device if it serves that, else one of its own."""
    served = [device.type for device in (group or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    own = [tensor.device for _, tensor in named if tensor.device.type in served][:1]
    if own or not served or "cpu" in served:
        return own[0] if own else torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())
