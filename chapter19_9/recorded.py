"""One rank's training step with everything that the lifecycle needs, for any strategy: what ``train(lifecycle_step=...)``
records, and what its figures are compared with."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chapter19_9.strategies.shards import Flat, blocks, place
from d2l_utils.events import Recording

ROOT = ""  # everything that is in no block


@dataclass(frozen=True)
class Recorded:
    """One rank's recorded step, and what its figures are compared with.

    recording : with holdings, and with the memory curve.
    whole     : by block ("" is what is in none), bytes of its unsharded parameters, of the gradients of those
                that are trained, and of AdamW's states for them.
    start     : bytes of model states on this rank when the step began, DDP's buckets included.
    """

    strategy: str
    recording: Recording
    whole: dict[str, tuple[int, int, int]]
    start: int


def kept(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, block, tensor) of what hand-written ZeRO keeps in its flat vectors, where no module shows it."""
    for flat in vars(model).get("flats", []):
        yield from (("parameters", block, part) for block, part in _by_block(flat, flat.shard.detach()))
        if (gradient := flat.gradient()) is not None:
            yield from (("gradients", block, part) for block, part in _by_block(flat, gradient))
        for state in getattr(optimizer, "optim", optimizer).state.get(flat.shard, {}).values():
            if isinstance(state, Tensor):
                yield from (("optimizer", block, part) for block, part in _by_block(flat, state))


def _by_block(flat: Flat, part: Tensor) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of a flat vector, cut where another block begins. Padding goes with the last block."""
    if flat not in _PIECES:  # asked for at every sample
        _PIECES[flat] = flat.layout.shard, _pieces(flat)
    length, pieces = _PIECES[flat]
    if part.numel() != length:  # AdamW counts its steps in a scalar
        yield _block(flat.entries[0].names[0]), part
        return
    for block, begin, end in pieces:
        yield block, part[begin:end]


_PIECES: weakref.WeakKeyDictionary[Flat, tuple[int, list[tuple[str, int, int]]]] = weakref.WeakKeyDictionary()


def _pieces(flat: Flat) -> list[tuple[str, int, int]]:
    """(block, from, to) of this rank's shard."""
    first, at, cuts = place()[0] * flat.layout.shard, 0, {}
    for entry, shape in zip(flat.entries, flat.layout.shapes, strict=True):
        at += shape.numel()
        cuts[_block(entry.names[0])] = at
    begin, pieces = 0, []
    for number, (block, end) in enumerate(cuts.items()):
        end = flat.layout.shard if number == len(cuts) - 1 else min(max(end - first, 0), flat.layout.shard)
        if end > begin:
            pieces.append((block, begin, end))
        begin = max(begin, end)
    return pieces


def _block(name: str) -> str:
    """ "blocks.0" of "blocks.0.up.weight"; "" of what is in no block."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return f"{head}.{number}" if number.isdigit() else ROOT


def unsharded(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters, gradients and AdamW's states by block, read off copies that take a step by themselves."""
    parameters = {
        name: nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    optimizer.step()
    sizes = {block: [0, 0, 0] for block in (ROOT, *blocks(model))}
    for name, parameter in parameters.items():
        size = sizes[_block(name)]
        size[0] += parameter.nbytes
        if parameter.grad is not None:
            size[1] += parameter.grad.nbytes
            size[2] += sum(state.nbytes for state in optimizer.state[parameter].values() if state.dim())
    return {block: (p, g, o) for block, (p, g, o) in sizes.items()}
