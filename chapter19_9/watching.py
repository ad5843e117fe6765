"""What the training loop measures around a step, kept out of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chapter19_9.strategies.shards import Flat, global_norm
from d2l_utils.agree import digest
from d2l_utils.device import rank_device
from d2l_utils.saved import SavedBytes


def where() -> tuple[int, int, torch.device]:
    """(rank, world size, device). Without a process group: one rank on the CPU, so that a notebook touches
    no accelerator."""
    if not dist.is_initialized():
        return 0, 1, torch.device("cpu")
    device = rank_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return dist.get_rank(), dist.get_world_size(), device


def now(device: torch.device) -> float:
    """Seconds, when the device is done with what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device.index)
    return time.perf_counter()


def mean_over_ranks(loss: Tensor, weight: float = 1.0) -> float:
    """What rank 0 prints is otherwise only rank 0's loss. Every rank must call it. weight: this rank's samples, in
    those of a mean rank."""
    value = loss.detach().double() * weight
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def whole(model: nn.Module, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter or gradient of a model that every rank holds whole."""
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            yield name, tensor


def at_hand(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """What this rank has of them: of a DTensor its shard. Nothing is gathered."""
    for tensor in tensors:
        yield getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach()


def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """32 bytes that tell these exact tensors from others; looks at one at a time."""
    return hashlib.sha256(b"".join(digest([tensor]) for tensor in tensors)).digest()


def on_any_rank(yes: bool, device: torch.device) -> bool:
    """Whether it is so on at least one rank. Every rank must call it."""
    if not dist.is_initialized():
        return yes
    answer = torch.tensor(int(yes), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of DDP's buckets, which stay when the gradients that are views of them are forgotten."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def weights_in_use(model: nn.Module) -> Iterator[Tensor]:
    """The weights that forward computes with, gathered ones too."""
    yield from model.parameters()
    flats: list[Flat] = vars(model).get("flats", [])
    yield from (flat.whole for flat in flats if hasattr(flat, "whole"))
    for module in model.modules():  # FSDP1's outermost unit stays gathered while its parameters show shards again
        gathered = getattr(getattr(getattr(module, "_handle", None), "flat_param", None), "_full_param_padded", None)
        if isinstance(gathered, Tensor):
            yield gathered


def recorder(
    model: nn.Module, optimizer: Any, wanted: bool, allocations: bool, holdings: bool = False
) -> AbstractContextManager[Any]:
    """Records the step inside it when ``wanted``: gives (recording, saved bytes), else (None, None). holdings: with
    what the lifecycle needs, which is too slow to time."""
    if holdings:
        return _held_recorder(model, optimizer)
    return _recorder(model, optimizer, allocations) if wanted else nullcontext((None, None))


@contextmanager
def _held_recorder(model: nn.Module, optimizer: Any) -> Iterator[tuple[Any, None]]:
    from chapter19_9.recorded import kept
    from d2l_utils.record import record

    with record(model, optimizer, allocations=True, holdings=lambda: kept(model, optimizer)) as recording:
        yield recording, None


@contextmanager
def _recorder(model: nn.Module, optimizer: Any, allocations: bool) -> Iterator[tuple[Any, SavedBytes | None]]:
    from d2l_utils.record import record

    with record(model, optimizer, allocations=allocations) as recording:
        if not allocations:
            yield recording, None
            return
        with SavedBytes(model, lambda: weights_in_use(model)) as saved:
            yield recording, saved


def gradient_norm(
    model: nn.Module, parts: Callable[[nn.Module], Iterable[Tensor]] | None = None, limit: float | None = None
) -> float:
    """2-norm of all of the model's gradients, as one vector; scaled down to ``limit`` when it is more.

    parts: of a gradient that lies in parts on the ranks, gives this rank's; else this rank has all of it.
    """
    if parts is not None:
        return global_norm(parts(model), limit)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return global_norm(gradients, limit, alone=True)
