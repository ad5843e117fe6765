"""What the registry says of a strategy, and in which words. Needs no torch."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
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
        return f"{__package__}.{self.name}"

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
