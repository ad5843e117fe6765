"""What this rank has of a training's states, in words that hold at any number of ranks: the parameter's name, and where
in the whole tensor a part lies.

The names are those of ``torch.distributed.checkpoint.state_dict``, whatever the strategy: what one has saved another
can read. Settings such as the learning rate are the script's, and not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from chapter19_9.strategies.shards import Flat, flats_of, not_flat, place

MODEL, STATE = "model.", "optimizer.state."
_FLAT_NAMES = StateDictOptions(flatten_optimizer_state_dict=True)


def states(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """{name: tensor} of weights and optimizer states: whole ones, DTensors, or ``Pieces``. To be filled in place.

    An optimizer that has not taken a step yet gets its states, without changing a weight; without an optimizer they are
    left out. Every rank must call it.
    """
    weights = _flat_weights(model) if "flats" in vars(model) else get_model_state_dict(model)
    found = {f"{MODEL}{name}": tensor for name, tensor in dict(weights).items()}
    if optimizer is not None:
        found |= {f"{STATE}{name}": tensor for name, tensor in _optimizer_states(model, optimizer)}
    return found


def _flat_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from not_flat(model)
    for flat in flats_of(model):
        yield from pieces(flat, flat.shard.detach(), every_name=True)


def _optimizer_states(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    if "flats" in vars(model):
        inner = getattr(optimizer, "optim", optimizer)
        begin(inner)
        for flat in flats_of(model):
            for key, state in inner.state.get(flat.shard, {}).items():
                yield from ((f"{name}.{key}", piece) for name, piece in pieces(flat, state))
    elif isinstance(optimizer, ZeroRedundancyOptimizer):  # this rank has all states of some parameters
        begin(optimizer.optim)
        names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
        for parameter, own in optimizer.optim.state.items():
            yield from ((f"{names[id(parameter)]}.{key}", state) for key, state in own.items())
    else:
        for name, state in get_optimizer_state_dict(model, optimizer, options=_FLAT_NAMES).items():
            if name.startswith("state."):
                yield name.removeprefix("state."), state


def put(model: nn.Module, optimizer: Any, filled: Mapping[str, Tensor]) -> None:
    """What ``states`` gave was filled: bring up to date what is only a copy of it. Every rank must call it."""
    if "flats" in vars(model):
        for flat in flats_of(model):
            flat.refresh()
        return
    set_model_state_dict(model, {n.removeprefix(MODEL): t for n, t in filled.items() if n.startswith(MODEL)})
    if optimizer is not None and not isinstance(optimizer, ZeroRedundancyOptimizer):
        mine = {name.removeprefix("optimizer."): tensor for name, tensor in filled.items() if name.startswith(STATE)}
        settings: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT_NAMES)
        set_optimizer_state_dict(model, optimizer, settings | mine, options=_FLAT_NAMES)


@torch.no_grad()
def begin(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the states that it makes in its first step; no weight changes."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in trained:
        parameter.grad = None


def pieces(flat: Flat, part: Tensor, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, Pieces) of each parameter of a flat vector: what of it lies in ``part``, this rank's shard or what the
    optimizer keeps for it. Padding is in none. A scalar is every parameter's."""
    layout, at = flat.layout, 0
    begins = place()[0] * layout.shard
    for entry, shape in zip(flat.entries, layout.shapes, strict=True):
        if part.numel() != layout.shard or part.dim() == 0:  # AdamW counts its steps in a scalar
            found = part
        else:
            first, last = max(at, begins), min(at + shape.numel(), begins + layout.shard)
            views = {}
            for offset, size in boxes(shape, first - at, last - at):
                start = at + index_of(shape, offset) - begins
                views[torch.Size(offset)] = part[start : start + prod(size)].view(size)
            found = Pieces(shape, part, views)
        for name in entry.names if every_name else entry.names[:1]:
            yield name, found
        at += shape.numel()


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that the elements ``first`` to ``last`` - 1 of a tensor, counted row by row, are:
    the end of a row, whole rows, the beginning of one.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= last:
        return
    if len(shape) < 2:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    top, bottom = -(-first // row), last // row  # whole are the rows from top to bottom - 1

    def within(number: int, begins: int, ends: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offset, size in boxes(shape[1:], begins - number * row, ends - number * row):
            yield (number, *offset), (1, *size)

    if top > bottom:
        yield from within(bottom, first, last)
        return
    yield from within(top - 1, first, top * row)
    if top < bottom:
        yield (top, *[0] * (len(shape) - 1)), (bottom - top, *shape[1:])
    yield from within(bottom, bottom * row, last)


def index_of(shape: Sequence[int], offset: Sequence[int]) -> int:
    """Where the element at ``offset`` lies when all are counted row by row."""
    found = 0
    for size, at in zip(shape, offset, strict=True):
        found = found * size + at
    return found


class Pieces(Tensor):
    """A tensor of which this rank has some boxes: {offsets: tensor}. It has the whole's shape and no data of its own.

    The three methods are how ``torch.distributed.checkpoint`` asks a tensor what is here; DTensor has them too.
    """

    views: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, views: dict[torch.Size, Tensor]) -> Pieces:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)
        made.views = views
        return made

    def __init__(self, *_: Any) -> None:
        """``__new__`` did it all."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: only parts of this tensor are here, as views")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.views[chunk.offsets]), self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.size()) for offsets, view in self.views.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.views[index.offset]
