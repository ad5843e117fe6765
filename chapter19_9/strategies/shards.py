"""The vocabulary of ZeRO by hand: unit, flat vector, padding, shard, owner.

Parameters that belong together (a unit) are laid end to end in one flat vector. Zeros at its end, the padding,
make its length divisible by the number of ranks N. The r-th of the N equal parts is rank r's shard, and rank
r is the owner of every element in it. A shard may end inside a tensor, and may be padding only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chapter19_9.strategies.ring import How
from d2l_utils.device import rank_device

Group = Callable[[str, nn.Parameter], Hashable]


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the flat vector of ``n`` shards."""

    shapes: tuple[torch.Size, ...]
    n: int

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def shard(self) -> int:
        """Elements of one shard, the same for every rank."""
        return -(-self.numel // self.n)

    @property
    def padding(self) -> int:
        return self.n * self.shard - self.numel

    def pack(self, tensors: Iterable[Tensor]) -> Tensor:
        """The tensors end to end with padding, a new vector of (n x shard,)."""
        parts = [tensor.reshape(-1) for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def unpack(self, vector: Tensor) -> list[Tensor]:
        """The tensors, as views of a flat vector."""
        pieces = vector.split([*(shape.numel() for shape in self.shapes), self.padding])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=False)]

    def own(self, vector: Tensor) -> Tensor:
        """This rank's shard, as a view of a flat vector."""
        return vector.narrow(0, place()[0] * self.shard, self.shard)

    @property
    def unpadded(self) -> int:
        """Elements of this rank's shard that are no padding."""
        return min(max(self.numel - place()[0] * self.shard, 0), self.shard)


@dataclass(eq=False)
class Entry:
    """A parameter, and every place in the model where it is used: tied weights are one entry."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class Flat:
    """The parameters of one unit as one flat vector, of which this rank keeps and trains its shard.

    entries  : the parameters in it; ``trained`` is False when they are frozen.
    group    : the label of the optimizer's parameter group that they are in.
    dtype    : the element type that forward and backward compute in.
    how      : the way to reduce-scatter its gradients.
    shard    : this rank's part of the weights in float32: what the optimizer trains.
    """

    def __init__(self, unit: str, entries: list[Entry], group: Hashable, *, dtype: torch.dtype, how: How) -> None:
        self.unit, self.entries, self.group, self.dtype, self.how = unit, entries, group, dtype, how
        self.trained = entries[0].parameter.requires_grad
        for entry in entries:
            if not entry.parameter.is_floating_point():
                kind = str(entry.parameter.dtype).removeprefix("torch.")
                raise ValueError(
                    f"{entry.names[0]} is a parameter of {kind}: a flat vector takes floating-point ones only"
                )
        self.layout = Layout(tuple(entry.parameter.shape for entry in entries), place()[1])
        self.shard = nn.Parameter(self.layout.own(self.packed()).clone(), requires_grad=self.trained)
        self.shard.unpadded_numel = self.layout.unpadded  # type: ignore[attr-defined]  # for d2l_utils.memory.held

    def packed(self) -> Tensor:
        """The parameters as they are now, in float32."""
        return self.layout.pack(entry.parameter.detach().float() for entry in self.entries)

    def gradient(self) -> Tensor | None:
        """This rank's part of the averaged gradient; None before there is one."""
        return self.shard.grad

    def refresh(self, async_op: bool = False) -> Any:
        """``shard`` has new values: bring what is kept beside it up to date. Every rank must call it.

        ``async_op``: only begin, and give back what to wait for, or None.
        """


def entries(model: nn.Module, units: Iterable[str] = ()) -> list[tuple[str, Entry]]:
    """(unit, entry) of each distinct parameter, in the model's order.

    units: names of submodules. A parameter in none of them, or tied across several, is in the unit "", the root.
    """
    units = list(units)
    found: dict[int, tuple[set[str], Entry]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        used_by, entry = found.setdefault(id(parameter), (set(), Entry(parameter)))
        module, _, attribute = name.rpartition(".")
        entry.names.append(name)
        place = (model.get_submodule(module), attribute)
        if place not in entry.places:  # a module that stands in the model twice is one place
            entry.places.append(place)
        used_by.add(next((unit for unit in units if name.startswith(f"{unit}.")), ""))
    return [(used_by.pop() if len(used_by) == 1 else "", entry) for used_by, entry in found.values()]


def flatten(
    model: nn.Module,
    make: Callable[..., Flat],
    units: Iterable[str] = (),
    group: Group | None = None,
    frozen: bool = False,
) -> list[Flat]:
    """One ``make(unit, entries, group)`` for the trained parameters of each unit and group, and with
    ``frozen`` one for the frozen ones. The list is kept with the model, for ``flats_of``."""
    together: dict[tuple[str, Hashable, bool], list[Entry]] = {}
    for unit, entry in entries(model, units):
        parameter = entry.parameter
        if parameter.requires_grad or frozen:
            label = group(entry.names[0], parameter) if group else None
            together.setdefault((unit, label, parameter.requires_grad), []).append(entry)
    made = [make(unit, members, label) for (unit, label, _), members in together.items()]
    vars(model)["flats"] = made
    return made


def flats_of(model: nn.Module) -> list[Flat]:
    """The flat vectors that ``flatten`` made of this model. ValueError when it was not sharded."""
    if "flats" not in vars(model):
        raise ValueError("model is not sharded: call this strategy's shard() first")
    return vars(model)["flats"]


def blocks(model: nn.Module) -> list[str]:
    """Names of the usual units: the members of the outermost ModuleLists; of lists of lists, the members of the inner ones."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    first = {id(member): name for name, member in reversed(list(model.named_modules()))}
    units = [unit for name in outer for unit in _members(name, model.get_submodule(name))]
    return [
        unit for unit in units if first[id(model.get_submodule(unit))] == unit
    ]  # one that stands there twice is one


def _members(name: str, module: nn.Module) -> list[str]:
    """The module's name, or those of a list's members: a list is never called, and a unit has to be."""
    if not isinstance(module, nn.ModuleList):
        return [name]
    return [unit for i, member in enumerate(module) for unit in _members(f"{name}.{i}", member)]


def optimizer(
    model: nn.Module,
    lr: float,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict | None = None,
    **common: Any,
) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, or another optimizer that works element by element, over this rank's shards.

    options: settings of single parameter groups, by the labels that ``group`` gave them. Raises ValueError for
    an unknown label.
    """
    found: dict[Hashable, list[nn.Parameter]] = {}
    for flat in flats_of(model):
        if flat.trained:
            found.setdefault(flat.group, []).append(flat.shard)
    options = options or {}
    if unknown := options.keys() - found.keys():
        raise ValueError(f"options has {', '.join(map(repr, unknown))}: the groups are {', '.join(map(repr, found))}")
    groups = [{"params": parameters, **options.get(label, {})} for label, parameters in found.items()]
    if make is torch.optim.AdamW:
        common.setdefault("fused", True)  # as all strategies: on a GPU the other ways take M_P of memory for a moment
    return make(groups, lr=lr, **common)


def place() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_plain(model: nn.Module) -> None:
    """ValueError when the model, or a module in it, was sharded or wrapped before: what shards it takes plain ones."""
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    for name, module in model.named_modules():
        if "flats" in vars(module) or wrappers & {kind.__name__ for kind in type(module).__mro__}:
            raise ValueError(
                f"this model is already sharded ({name or 'as a whole'}): make a new one and shard it once"
            )


@torch.no_grad()
def broadcast(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers. ValueError when the model is sharded already."""
    check_plain(model)
    if dist.is_initialized():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def all_gather(whole: Tensor, part: Tensor, async_op: bool = False) -> dist.Work | None:
    """Fill ``whole`` with the ranks' ``part``; ``part`` may be this rank's part of ``whole``."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        whole.copy_(part)
        return None
    # torch 2.13 renamed it, and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, async_op=async_op)


def gradient_parts(model: nn.Module) -> list[Tensor]:
    """This rank's parts of the averaged gradient."""
    parts = [(flat, flat.gradient()) for flat in flats_of(model) if flat.trained]
    for flat, part in parts:
        if part is not None:
            part.unpadded_numel = flat.layout.unpadded  # type: ignore[attr-defined]  # for d2l_utils.memory.held
    return [part for _, part in parts if part is not None]


def element_type(name: torch.dtype | str) -> torch.dtype:
    """The torch.dtype of that name. ValueError when it is no floating-point type."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}: it must be a floating-point type such as float32 or bfloat16")
    return dtype


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], limit: float | None = None, alone: bool = False) -> float:
    """2-norm of a gradient that lies in parts on the ranks; every rank must call it. ``alone``: no other rank
    has a part of it. With ``limit``, a longer one is scaled down to it; the norm before that is returned."""
    if limit is not None and not limit > 0:
        raise ValueError(f"clip is {limit!r}: it must be above 0")
    gradients = list(gradients)
    # in float64: a long vector's norm in float32 is wrong in the sixth digit
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    together = dist.is_initialized() and not alone
    # a rank without gradients sends its 0 from where the others have theirs
    nothing = torch.zeros((), dtype=torch.float64, device=rank_device() if together else None)
    norm = torch.stack(norms).norm() if norms else nothing
    if together:
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    value = norm.item()
    if limit is not None and value > limit:
        for gradient in gradients:
            gradient.mul_(limit / (value + 1e-6))
    return value


def not_flat(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the parameters and buffers that every rank holds whole, under all their names."""
    flat = {id(entry.parameter) for flat in flats_of(model) for entry in flat.entries}
    flat |= {id(flat.shard) for flat in flats_of(model)}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if id(tensor) not in flat:
            yield name, tensor.detach()


@torch.no_grad()
def gathered(model: nn.Module, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each whole parameter, or of its averaged gradient, one flat vector at a time. Every
    rank must go through all of them."""
    for flat in flats_of(model):
        if (part := flat.gradient() if gradients else flat.shard.detach()) is not None:
            whole = part.new_empty(part.numel() * flat.layout.n)
            all_gather(whole, part)
            for entry, tensor in zip(flat.entries, flat.layout.unpack(whole), strict=True):
                yield entry.names[0], tensor
    if not gradients:
        yield from not_flat(model)


@torch.no_grad()
def full_state_dict(model: nn.Module, to: int = 0) -> dict[str, Tensor]:
    """The unsharded model's state dict, under all its names, on the CPU of rank ``to``; {} on the others.
    Every rank must call it."""
    rank, n = place()
    if to not in range(n):
        raise ValueError(f"to is {to!r}: it must be a rank from 0 to {n - 1}")
    found = {name: tensor.cpu().clone() for name, tensor in not_flat(model)}
    for flat in flats_of(model):
        shard = flat.shard.detach()
        parts = [torch.empty_like(shard) for _ in range(n)] if rank == to else None
        if n > 1:
            dist.gather(shard, parts, dst=to)
        if parts is not None:
            tensors = flat.layout.unpack(torch.cat(parts) if n > 1 else shard)
            for entry, tensor in zip(flat.entries, tensors, strict=True):
                found.update(dict.fromkeys(entry.names, tensor.cpu().clone()))
    return found if rank == to else {}


@torch.no_grad()
def load_full(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a sharded model the weights of an unsharded one. Every rank must call it, with the same state dict.

    Raises ValueError naming what is missing or has another shape.
    """
    for name, kept in not_flat(model):
        kept.copy_(state[name])
    for flat in flats_of(model):
        given = [state.get(entry.names[0]) for entry in flat.entries]
        for entry, tensor, shape in zip(flat.entries, given, flat.layout.shapes, strict=True):
            if tensor is None or tensor.shape != shape:
                has = "missing" if tensor is None else f"{tuple(tensor.shape)}"
                raise ValueError(f"state[{entry.names[0]!r}] is {has}: it must have shape {tuple(shape)}")
        flat.shard.copy_(flat.layout.own(flat.layout.pack(t.float() for t in given if t is not None)))
        flat.refresh()
