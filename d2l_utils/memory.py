"""What this rank holds of a model's states, and the peak inside a step.

    print(held(model, optimizer))
    with PeakMemory() as peak:
        loss.backward()
    print(peak)

Tensor bytes, not process bytes: a process's resident memory is mostly imported libraries and pages shared
with others, and Python's own counters do not see tensors at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from d2l_utils import profiler
from d2l_utils.ranges import in_memory, span, union
from d2l_utils.units import format_bytes

__all__ = ["Held", "PeakMemory", "Sizes", "format_bytes", "held", "peak"]


@dataclass(frozen=True)
class Sizes:
    """Bytes of the three kinds of model states. None: not yet allocated, which is not the same as 0."""

    parameters: int
    gradients: int | None
    optimizer: int | None


@dataclass(frozen=True)
class Held(Sizes):
    """Bytes of the model states that this rank holds at this moment.

    parameters, gradients, optimizer : bytes of the distinct live storages behind them, on this rank. Tied
        and aliased tensors count once, a storage that was freed (resized to 0) counts 0, padding counts.
    total  : the same over all three; a storage that two kinds share counts once.
    needed : the part of those storages that the tensors really cover; less than held means padding, or
        room in the storage that belongs to something else. A parameter whose end is padding says so in
        ``unpadded_numel``, its elements before that; its gradient and states of its shape end there too, and
        where it is padding only, all its states are.
    whole  : the size over all ranks of a sharded tensor (DTensor); for an ordinary tensor its own size.

    A sparse tensor is its indices and values. Tensors on the meta device, and lazy ones before their first forward,
    hold nothing.
    """

    total: int
    needed: Sizes
    whole: Sizes

    def __str__(self) -> str:
        lines = []
        for kind in ("parameters", "gradients", "optimizer"):
            bytes_held, needed, whole = (getattr(x, kind) for x in (self, self.needed, self.whole))
            line = f"{kind:<11}{format_bytes(bytes_held)}"
            if bytes_held is not None:
                line += f" of {format_bytes(needed)} needed" if needed > bytes_held else ""
                line += f", {format_bytes(needed)} of it needed" if needed < bytes_held else ""
                line += f", {format_bytes(whole)} over all ranks" if whole != max(needed, bytes_held) else ""
                line += " (freed)" if not bytes_held and whole else ""
            lines.append(line)
        return "\n".join(lines)


def held(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    gradients: Iterable[Tensor] = (),
    parameters: Iterable[Tensor] = (),
) -> Held:
    """The model states that this rank holds now. Counts what exists: looks at no formula, copies nothing.

    gradients: further ones, which no parameter of the model holds as its ``grad``. parameters: further ones, where
    ``model.parameters()`` are not what this rank keeps of them. Unsharded gradients that FSDP2 keeps for itself while
    their synchronisation is off are found.
    Raises TypeError for a tensor whose memory PyTorch does not show (MKL-DNN's).
    """
    further = list(parameters)
    parameters = list(model.parameters())
    own = [(p.grad, _unpadded(p, p.grad)) for p in parameters if p.grad is not None]
    own += [(gradient, getattr(gradient, "unpadded_numel", None)) for gradient in gradients]
    own += [(gradient, None) for _, gradient in unsharded_gradients(model)]
    states = None if optimizer is None else _states(optimizer)
    p, g = _Tally((tensor, _unpadded(tensor, tensor)) for tensor in [*parameters, *further]), _Tally(own)
    o = _Tally(states or [])
    no_gradients, no_states = not own, not states and not _keeps_no_state(optimizer)

    def sizes(name: str) -> tuple[int, int | None, int | None]:
        of_p, of_g, of_o = (getattr(tally, name)() for tally in (p, g, o))
        return of_p, None if no_gradients else of_g, None if no_states else of_o

    total = sum((p.storages | g.storages | o.storages).values())
    return Held(*sizes("held"), total, Sizes(*sizes("needed")), Sizes(*sizes("whole")))


class _Tally:
    """Distinct storages behind some tensors, and the byte ranges of them that the tensors cover.

    tensors: each with the number of its first elements that are no padding, or None where it has none.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, int | None]]) -> None:
        self.storages: dict[tuple[torch.device, int], int] = {}
        self._ranges: dict[tuple[torch.device, int], set[tuple[int, int]]] = {}
        self._plain: dict[tuple[torch.device, int], set[tuple[int, int]]] = {}
        self._sharded: dict[tuple[torch.device, int, int], int] = {}
        for tensor, unpadded in tensors:
            for part in in_memory(tensor):
                storage = part.untyped_storage()
                # freed and empty storages all sit at address 0: they are told apart by their object
                key = (part.device, storage.data_ptr() or -storage._cdata)
                self.storages[key] = max(storage.nbytes(), self.storages.get(key, 0))
                first = int(part.storage_offset()) * part.element_size()
                covered = (first, first + span(part) * part.element_size())
                needed = covered if unpadded is None else (first, first + unpadded * part.element_size())
                self._ranges.setdefault(key, set()).add(needed)
                if hasattr(tensor, "_local_tensor"):
                    self._sharded[*key, first] = int(tensor.numel()) * tensor.element_size()
                else:
                    self._plain.setdefault(key, set()).add(covered)

    def held(self) -> int:
        return sum(self.storages.values())

    def needed(self) -> int:
        return sum(map(union, self._ranges.values()))

    def whole(self) -> int:
        return sum(map(union, self._plain.values())) + sum(self._sharded.values())


def _unpadded(parameter: Any, tensor: Tensor) -> int | None:
    """Elements of a tensor of this parameter before the padding, None where there is none."""
    local = getattr(parameter, "_local_tensor", parameter)
    needed: int | None = (
        0 if local is not parameter and not local.numel() else getattr(parameter, "unpadded_numel", None)
    )
    if needed is None and getattr(parameter, "_shard_numel_padded", None):  # FSDP1's, which counts the padding itself
        shard = parameter._local_shard.numel()
        needed = shard - parameter._shard_numel_padded if parameter.numel() == shard else None  # else it is unsharded
    return needed if needed == 0 or (needed is not None and tensor.shape == parameter.shape) else None


def unsharded_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(parameter's name, gradient) of what FSDP2 holds of gradients that it has not reduced, as it does while gradient sync
    is off. Its parameters are shards: none has these as its ``grad``."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        # one group a module before torch 2.12
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
            yield from ((parameter._param_fqn, one) for one in (gradient, accumulated) if one is not None)


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, int | None]]:
    """Tensors in the optimizer's state, and in that of an optimizer that it wraps as ``optim``, as ``_Tally`` takes
    them."""
    found = [(t, _unpadded(parameter, t)) for parameter, state in optimizer.state.items() for t in _tensors(state)]
    inner = getattr(optimizer, "optim", None)
    return found + (_states(inner) if isinstance(inner, torch.optim.Optimizer) else [])


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _keeps_no_state(optimizer: torch.optim.Optimizer | None) -> bool:
    """True where states are 0 bytes for ever, not "not yet allocated": SGD without momentum, and an optimizer
    (or the one that it wraps as ``optim``) that trains nothing on this rank."""
    inner = getattr(optimizer, "optim", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        return False
    if not any(group["params"] for group in inner.param_groups):
        return True
    return isinstance(inner, torch.optim.SGD) and not any(group["momentum"] for group in inner.param_groups)


def allocator(device: torch.device) -> Any:
    """The module with the memory functions of this device's allocator: one for all accelerators, since torch 2.12."""
    return torch.accelerator if hasattr(torch.accelerator, "memory_allocated") else torch.get_device_module(device)


class PeakMemory:
    """The most tensor memory alive at once inside a ``with`` block, in bytes above its start.

    On an accelerator: its allocator's own peak, reset at the start, less what was allocated then. On the
    CPU: the running total of the allocations and frees that torch.profiler records in this block. It sees this
    thread and backward, not what other threads allocate. Memory that was allocated before the block and is
    freed inside it is not seen on the CPU, so zero the gradients first.

    device  : by default this rank's; outside a rank the CPU.
    bytes   : the peak, once the block has ended.
    counter : the name of the counter that was read, and what it does not see.

    Raises RuntimeError on the CPU when a profiler is already running in this process or another one starts inside
    the block, and anywhere for a block inside another.
    """

    _active = False  # an inner block would reset the peak of the outer one

    def __init__(self, device: torch.device | str | None = None) -> None:
        # a device that this process has touched need not be the one that it computes on
        self.device = profiler.default_device() if device is None else torch.device(device)
        self.bytes: int | None = None
        self.counter = "CPU allocations seen by torch.profiler; it does not see other threads"
        if self.device.type != "cpu":
            self.counter = f"torch.{self.device.type}.max_memory_allocated"

    def __enter__(self) -> PeakMemory:
        if PeakMemory._active:
            raise RuntimeError("PeakMemory is already measuring: a block inside another cannot be measured")
        with contextlib.ExitStack() as inside:
            if self.device.type == "cpu":
                self._profile = inside.enter_context(profiler.profiling(self.device, memory=True))
            else:
                torch.accelerator.synchronize(self.device)
                allocator(self.device).reset_peak_memory_stats(self.device)
                self._start = allocator(self.device).memory_allocated(self.device)
            self._inside = inside.pop_all()
        PeakMemory._active = True
        return self

    def __exit__(self, *error: object) -> None:
        PeakMemory._active = False
        self._inside.close()
        if self.device.type == "cpu":
            self.bytes = self._highest(self._profile)
            del self._profile
        else:
            torch.accelerator.synchronize(self.device)
            self.bytes = allocator(self.device).max_memory_allocated(self.device) - self._start

    @staticmethod
    def _highest(profile: Any) -> int:
        changes = [
            (e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
        ]
        unseen = profiler.ends_without_beginning(profile)
        total, highest = 0, 0
        for at, change in sorted(changes, key=lambda pair: pair[0]):
            if unseen[at, change]:
                unseen[at, change] -= 1
                continue
            total += change
            highest = max(highest, total)
        return highest

    def __str__(self) -> str:
        if self.bytes is None:
            return f"peak not measured yet ({self.counter})"
        return f"peak {format_bytes(self.bytes)} above the start ({self.counter})"


peak = PeakMemory
