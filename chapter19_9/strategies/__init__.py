"""The registry: what each strategy shards, when it communicates, and in whose API.

    >>> get("ddp").communicates
    (Exchange(collective='all_reduce', of='gradients', when='backward'),)

Reading it needs no torch. Each strategy is a module of this package with

    shard(model, device, **options) -> model            places the model and wraps or shards it
    optimizer(model, lr) -> torch.optim.Optimizer       made from what shard returned
    accumulating(model) -> context manager              optional: backward inside it is not the step's last
    backward(model, loss)                               optional: where it is not loss.backward()
    gradient_parts(model) -> tensors                    where gradients end in parts: this rank's
    gathered(model, gradients=False) -> (name, tensor)  where model.parameters() are not the whole ones
    parameter_parts(model) -> tensors                   where model.parameters() are not this rank's parts either
    standing(model) -> tensors                          where buffers outlive a step: these

and a ``dtype`` among the options, where ``mixed`` is not "autocast".
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal

Layout = Literal["replicated", "sharded"]
State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True)
class Exchange:
    """One collective over all bytes of one state.

    part  : of which units: all, those of the blocks, or the root's.
    every : once in a step, or in every forward or backward of a step that accumulates gradients.
    """

    collective: str
    of: State
    when: Literal["forward", "backward", "optimizer"]
    part: Literal["all", "blocks", "root"] = "all"
    every: Literal["step", "pass"] = "step"

    def __str__(self) -> str:
        where = "" if self.part == "all" else f" ({self.part})"
        return f"{self.collective} of {self.of}{where} in {self.when}"


@dataclass(frozen=True)
class Strategy:
    """Facts about one way to train on N ranks.

    name, title                      : its key, and its name for a reader.
    parameters, gradients, optimizer : where these states are at rest: whole on every rank, or in parts.
    communicates                     : what a step exchanges; empty when the ranks do not talk.
    api                              : the public names that it is made of.
    source                           : the paper or documentation page that it follows.
    cut                              : how the sharded states are cut into parts. "flat": units laid end to end
                                       and padded; "tensors": whole tensors, to the rank with the fewest
                                       elements; "rows": each tensor by dimension 0.
    units                            : what is laid together, or gathered together.
    align                            : in a flat vector each tensor begins at a multiple of so many float32 elements.
    mixed                            : how forward and backward compute in 16 bits. "autocast": torch casts what it
                                       multiplies, all states stay float32; "copies": 16-bit parameters and
                                       gradients beside the optimizer's float32 weights; "gathered": float32 shards,
                                       gathered in 16 bits. ``shard`` of the last two takes ``dtype``.
    reduces                          : what gradients are then reduced in.
    masters                          : the optimizer trains a copy of this rank's parts, all in one tensor.
    norm                             : bytes all-reduced in every step for the norm of the gradient.
    extra                            : the optional package that it needs; "" for none.
    module                           : the file in this package.
    """

    name: str
    title: str
    api: str
    source: str
    parameters: Layout = "replicated"
    gradients: Layout = "replicated"
    optimizer: Layout = "replicated"
    communicates: tuple[Exchange, ...] = ()
    cut: Literal["none", "flat", "tensors", "rows", "even"] = "none"
    units: Literal["model", "blocks", "tensors"] = "model"
    align: int = 1
    mixed: Literal["autocast", "copies", "gathered"] = "autocast"
    reduces: Literal["float32", "16 bits"] = "float32"
    masters: bool = False
    extra: str = ""
    norm: int = 0

    @property
    def window(self) -> Literal["step", "pass", "either"]:
        """When a step that accumulates exchanges gradients: once, in every backward, or as one likes."""
        backward = [
            exchange for exchange in self.communicates if exchange.of == "gradients" and exchange.when == "backward"
        ]
        return "step" if not backward else "pass" if backward[0].every == "pass" else "either"

    @property
    def module(self) -> str:
        return f"{__name__}.{self.name}"

    @property
    def installed(self) -> bool:
        """Whether what it needs beside PyTorch is installed. Imports nothing."""
        return not self.extra or importlib.util.find_spec(self.extra) is not None

    def check(self) -> None:
        """ValueError saying what to install when it is not."""
        if not self.installed:
            raise ValueError(
                f"strategy {self.name!r} needs the extra {self.extra!r}, which is not installed here: in the chapter's "
                f"folder, run python -m pip install --no-build-isolation -e '.[{self.extra}]'"
            )

    def load(self) -> ModuleType:
        """The strategy's module, imported now. ValueError when what it needs is not installed."""
        self.check()
        return importlib.import_module(self.module)


_ZERO = "ZeRO (arXiv 1910.02054)"
_FSDP1 = "PyTorch FSDP (arXiv 2304.11277)"
_FSDP2 = "torch.distributed.fsdp.fully_shard documentation"
_GATHER = Exchange("all_gather", "parameters", "forward", every="pass")
_GATHER_AGAIN = Exchange("all_gather", "parameters", "backward", every="pass")
_REDUCE = Exchange("reduce_scatter", "gradients", "backward")
_REDUCE_EACH = Exchange("reduce_scatter", "gradients", "backward", every="pass")
_NEW = Exchange("all_gather", "parameters", "optimizer")

_ALL = (
    Strategy(
        name="single",
        title="each rank alone",
        api="torch.nn.Module",
        source="torch.optim documentation",
    ),
    Strategy(
        name="ddp",
        title="DistributedDataParallel",
        api="torch.nn.parallel.DistributedDataParallel",
        source="PyTorch Distributed (arXiv 2006.15704)",
        communicates=(Exchange("all_reduce", "gradients", "backward"),),
    ),
    Strategy(
        name="zero1",
        title="ZeRO-1 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os",
        optimizer="sharded",
        communicates=(Exchange("reduce_scatter", "gradients", "optimizer"), _NEW),
        cut="flat",
        units="blocks",
        mixed="copies",
        reduces="16 bits",
    ),
    Strategy(
        name="zero2",
        title="ZeRO-2 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os+g",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_REDUCE_EACH, _NEW),
        cut="flat",
        units="blocks",
        mixed="copies",
        reduces="16 bits",
    ),
    Strategy(
        name="zero3",
        title="ZeRO-3 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os+g+p",
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _GATHER_AGAIN, _REDUCE_EACH),
        cut="flat",
        units="blocks",
        mixed="gathered",
        reduces="16 bits",
    ),
    Strategy(
        name="zero_redundancy",
        title="DDP + ZeroRedundancyOptimizer",
        api="torch.distributed.optim.ZeroRedundancyOptimizer",
        source="torch.distributed.optim documentation",
        optimizer="sharded",
        communicates=(
            Exchange("all_reduce", "gradients", "backward"),
            Exchange("broadcast", "parameters", "optimizer"),
        ),
        cut="tensors",
    ),
    Strategy(
        name="fsdp1",
        title="FSDP1 FULL_SHARD",
        api="torch.distributed.fsdp.FullyShardedDataParallel",
        source=_FSDP1,
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, replace(_GATHER_AGAIN, part="blocks"), _REDUCE),
        cut="flat",
        units="blocks",
        align=4,
        mixed="gathered",
    ),
    Strategy(
        name="fsdp1_grad_op",
        title="FSDP1 SHARD_GRAD_OP",
        api="torch.distributed.fsdp.FullyShardedDataParallel",
        source=_FSDP1,
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(replace(_GATHER, every="step"), _REDUCE),
        cut="flat",
        units="blocks",
        align=4,
        mixed="gathered",
    ),
    Strategy(
        name="fsdp2",
        title="FSDP2, reshard after forward",
        api="torch.distributed.fsdp.fully_shard",
        source=_FSDP2,
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _GATHER_AGAIN, _REDUCE),
        cut="rows",
        units="blocks",
        mixed="gathered",
    ),
    Strategy(
        name="fsdp2_no_reshard",
        title="FSDP2, no reshard after forward",
        api="torch.distributed.fsdp.fully_shard",
        source=_FSDP2,
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _REDUCE),
        cut="rows",
        units="blocks",
        mixed="gathered",
    ),
    Strategy(
        name="fsdp2_root_only",
        title="FSDP2 on the root only",
        api="torch.distributed.fsdp.fully_shard",
        source=_FSDP2,
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _REDUCE),
        cut="rows",
        mixed="gathered",
    ),
)

_DEEPSPEED = Strategy(
    name="", title="", api="deepspeed.initialize", source="deepspeed.readthedocs.io", extra="deepspeed"
)
_STAGES = (
    replace(
        _DEEPSPEED,
        name="deepspeed0",
        title="DeepSpeed stage 0",
        communicates=(Exchange("all_reduce", "gradients", "backward"),),
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed1",
        title="DeepSpeed stage 1",
        gradients="sharded",  # when backward is over
        optimizer="sharded",
        communicates=(Exchange("all_reduce", "gradients", "backward"), _NEW),
        cut="even",
        masters=True,
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed2",
        title="DeepSpeed stage 2",
        gradients="sharded",
        optimizer="sharded",
        communicates=(Exchange("all_reduce", "gradients", "backward", every="pass"), _NEW),
        cut="even",
        masters=True,
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed3",
        title="DeepSpeed stage 3",
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _GATHER_AGAIN, _REDUCE_EACH),
        cut="flat",
        units="tensors",
        masters=True,
        norm=8,
    ),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}
OPTIONAL = {strategy.name: strategy for strategy in _STAGES}
"""Strategies that need an extra: in no list unless asked for, so that lessons do not depend on what is installed."""


def get(name: str) -> Strategy:
    """The strategy of that name, installed or not. ValueError says which names there are."""
    found = STRATEGIES.get(name) or OPTIONAL.get(name)
    if found is None:
        raise ValueError(f"strategy is {name!r}: it must be one of {', '.join([*STRATEGIES, *OPTIONAL])}")
    return found
