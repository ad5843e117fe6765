"""The registry: what each strategy shards, when it communicates, and in whose API.

    >>> get("ddp").communicates
    (Exchange(collective='all_reduce', of='gradients', when='backward'),)

Reading it needs no torch. Each strategy is a module of this package with

    shard(model, device, **options) -> model            places the model and wraps or shards it
    optimizer(model, lr) -> torch.optim.Optimizer       made from what shard returned
    accumulating(model) -> context manager              optional: backward inside it does not communicate
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

Layout = Literal["replicated", "sharded"]
State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True)
class Exchange:
    """One collective over all bytes of one state, once in every step."""

    collective: str
    of: State
    when: Literal["forward", "backward", "optimizer"]

    def __str__(self) -> str:
        return f"{self.collective} of {self.of} in {self.when}"


@dataclass(frozen=True)
class Strategy:
    """Facts about one way to train on N ranks.

    name, title                      : its key, and its name for a reader.
    parameters, gradients, optimizer : where these states are: whole on every rank, or in parts.
    communicates                     : what a step exchanges; empty when the ranks do not talk.
    api                              : the public names that it is made of.
    source                           : the paper or documentation page that it follows.
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

    @property
    def module(self) -> str:
        return f"{__name__}.{self.name}"

    def load(self) -> ModuleType:
        """The strategy's module, imported now."""
        return importlib.import_module(self.module)


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
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}


def get(name: str) -> Strategy:
    """The strategy of that name. ValueError says which names there are."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy is {name!r}: it must be one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
