"""Kinds of model that readers write, small: what a block or a model returns, and how often it is called.

Each is trained for two passes by one process, part of the batch after part of the batch, and by two ranks.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chapter19_9 import strategies
from chapter19_9.watching import whole

CPU, PASSES, RANKS = torch.device("cpu"), 2, 2


class Pair(NamedTuple):
    x: Tensor
    aux: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    aux: Tensor
    name: str = "a block"


@dataclasses.dataclass
class Computed:
    """A field that no constructor takes."""

    x: Tensor
    aux: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dataclass that is a dict too, as libraries of models have them."""

    x: Any = None
    aux: Any = None
    cache: Any = None

    def __post_init__(self):
        self.update(x=self.x, aux=self.aux)


class Named(dict):
    """A dict by another name."""


def computed(x, aux):
    made = Computed(x)
    made.aux = aux
    return made


# Each: how a block returns (x, aux), and how its caller takes them out again.
CONTAINERS = {
    "tuple": (lambda x, aux: (x, aux), lambda out: out),
    "list": (lambda x, aux: [x, aux], lambda out: out),
    "dict": (lambda x, aux: {"x": x, "aux": aux}, lambda out: (out["x"], out["aux"])),
    "dict of another name": (lambda x, aux: Named(x=x, aux=aux), lambda out: (out["x"], out["aux"])),
    "namedtuple": (Pair, lambda out: (out.x, out.aux)),
    "dataclass": (Frozen, lambda out: (out.x, out.aux)),
    "dataclass with a computed field": (computed, lambda out: (out.x, out.aux)),
    "dataclass that is a dict": (Output, lambda out: (out.x, out.aux)),
    "nested, with None and a word": (
        lambda x, aux: {"hidden": [None, (x, {"all": [aux]})], "name": "a block", "count": 3},
        lambda out: (out["hidden"][1][0], out["hidden"][1][1]["all"][0]),
    ),
}


class Block(nn.Module):
    """x + tanh(W x), and a scalar that the loss has as well."""

    def __init__(self, pack=None):
        super().__init__()
        self.linear, self.pack = nn.Linear(6, 6), pack

    def forward(self, x):
        hidden = self.linear(x)
        out = x + torch.tanh(hidden)
        return self.pack(out, hidden.square().mean()) if self.pack else out


class Model(nn.Module):
    """A stem, two blocks, a head. ``take`` undoes what ``pack`` did in a block; ``give`` packs what the model returns."""

    def __init__(self, blocks, take=None, give=None, share=1.0):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 6), nn.ModuleList(blocks), nn.Linear(6, 1)
        self.take, self.give, self.share = take, give, share

    def forward(self, x):
        x, total = self.stem(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            if self.take:
                x, aux = self.take(x)
                total = total + self.share * aux if self.share else total
        out = self.head(x).square().mean()
        return self.give(out, total) if self.give else out + total


class Keywords(Block):
    def forward(self, *, x, scale=None):
        return super().forward(x if scale is None else x * scale)


class CallsByKeyword(Model):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x=x, scale=x.mean())
        return self.head(x).square().mean()


class Delta(Block):
    """Returns what it was given, unchanged, and what is to be added to it."""

    def forward(self, x):
        return x, torch.tanh(self.linear(x))


class AddsInPlace(Block):
    """Returns what it was given, changed."""

    def forward(self, x):
        x += torch.tanh(self.linear(x.clone()))
        return x


class View(Block):
    """Returns a view of what it made."""

    def forward(self, x):
        return super().forward(x).view(x.shape)


class ChangesViews(Model):
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x *= 2
        return self.head(x).square().mean()


class Appends(Block):
    """Returns nothing, and puts what it makes into the dict that it was given."""

    def forward(self, state):
        state["x"] = super().forward(state["x"])


class KeepsState(Model):
    def forward(self, x):
        state = {"x": self.stem(x)}
        for block in self.blocks:
            block(state)
        return self.head(state["x"]).square().mean()


class Stages(Model):
    """Lists of blocks in a list, which are never called themselves."""

    def forward(self, x):
        x = self.stem(x)
        for stage in self.blocks:
            for block in stage:
                x = block(x)
        return self.head(x).square().mean()


def hooked():
    """A hook of the reader's own uses the weights before each forward."""
    model = Model([Block(), Block()])
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, given: (given[0] * block.linear.weight.mean(),))
    return model


class LoRA(Block):
    """A frozen weight, and a trained one of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x) + self.up(self.down(x)))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(super().forward(x))


class Unused(Block):
    """Returns what it was given, and uses none of its weights."""

    def forward(self, x):
        return x


class UsedTwice(Model):
    def forward(self, x):
        one = self.blocks[1](self.blocks[0](self.stem(x)))
        return self.head(self.blocks[0](one) + self.blocks[1](one)).square().mean()


def adapted():
    """All frozen but the adapters."""
    model = Model([LoRA(), LoRA()])
    model.stem.requires_grad_(False)
    return model


def once(model, loss, x):
    loss(model(x)).backward()


def two_forwards(model, loss, x):
    first, second = loss(model(x[:2])), loss(model(x[2:]))
    (first + second).backward()


def two_backwards(model, loss, x):
    value = loss(model(x))
    value.backward(retain_graph=True)
    value.backward()


def itself(value):
    return value


# {kind: (how the model is made, how its loss is had from what it returns, how a pass goes)}
KINDS = {
    "tensor": (lambda: Model([Block(), Block()]), itself, once),
    **{
        f"blocks return a {kind}": (lambda pack=pack, take=take: Model([Block(pack), Block(pack)], take), itself, once)
        for kind, (pack, take) in CONTAINERS.items()
    },
    **{
        f"the model returns a {kind}": (
            lambda pack=pack: Model([Block(), Block()], give=pack), lambda out, take=take: take(out)[0], once,
        )
        for kind, (pack, take) in CONTAINERS.items()
    },
    "only one member reaches the loss": (
        lambda: Model([Block(CONTAINERS["tuple"][0]) for _ in range(2)], itself, share=0), itself, once,
    ),
    "inputs by keyword": (lambda: CallsByKeyword([Keywords(), Keywords()]), itself, once),
    "the input comes back beside the result": (lambda: Model([Delta(), Delta()], lambda out: (sum(out), 0.0)), itself, once),
    "the input comes back changed in place": (lambda: Model([AddsInPlace(), AddsInPlace()]), itself, once),
    "a view that comes back is changed in place": (lambda: ChangesViews([View(), View()]), itself, once),
    "blocks used twice": (lambda: UsedTwice([Block(), Block()]), itself, once),
    "two forwards before a backward": (lambda: Model([Block(), Block()]), itself, two_forwards),
    "two backwards of one graph": (lambda: Model([Block(), Block()]), itself, two_backwards),
    "one block twice in the list": (lambda: Model([Block()] * 2), itself, once),
    "lists of blocks in a list": (
        lambda: Stages([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])]), itself, once,
    ),
    "blocks change a dict that they are given": (lambda: KeepsState([Appends(), Appends()]), itself, once),
    "a hook of a block uses its weights": (hooked, itself, once),
    "low-rank adapters on a frozen base": (adapted, itself, once),
    "batch norm": (lambda: Model([Normed(), Normed()]), itself, once),
    "a block that is not used": (lambda: Model([Block(), Unused()]), itself, once),
}  # fmt: skip


def made(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return KINDS[kind][0]()


def batch(number):
    """Eight samples for all ranks together."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def judged(kind):
    """The averaged gradients of the last pass, by one process: the ranks' parts of the batch one after the other."""
    _, loss, run = KINDS[kind]
    model = made(kind)
    for part in batch(PASSES - 1).chunk(RANKS):
        run(model, lambda out: loss(out) / RANKS, part)
    return dict(whole(model, gradients=True))


def gradients(strategy):
    """{kind: the averaged gradients of the last pass, or the error} of two ranks under a strategy."""
    import torch.distributed as dist

    module, rank, found = strategies.get(strategy).load(), dist.get_rank(), {}
    parts, gathered = getattr(module, "gradient_parts", None), getattr(module, "gathered", None)
    for kind, (_, loss, run) in KINDS.items():
        plain = made(kind)
        try:
            model = module.shard(plain, CPU)
            optimizer = module.optimizer(model, 1e-3)
            for number in range(PASSES):
                optimizer.zero_grad()
                run(model, loss, batch(number).chunk(RANKS)[rank])
                _ = parts(model) if parts else None  # zero1 averages when it is asked for them
            named = gathered(model, gradients=True) if gathered else whole(plain, gradients=True)
            found[kind] = {name: tensor.clone() for name, tensor in named}
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
    return found
