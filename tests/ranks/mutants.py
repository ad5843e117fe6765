"""Hand-written ZeRO broken in one place each. test_mutants proves that the suite's own check fails on every one.

Each entry: strategy, its options, and a context manager inside which the code is broken.
"""

import contextlib
import functools
from unittest import mock

import torch

from chapter19_9 import watching
from chapter19_9.strategies import ring, shards, zero1, zero2, zero3


def replaced(owner, name, new):
    return functools.partial(mock.patch.object, owner, name, new)


def only_mine(part, whole, how="auto"):
    """No sum over the ranks: each keeps its part of its own gradient."""
    part.copy_(whole.narrow(0, shards.place()[0] * part.numel(), part.numel()))


def sum_not_mean(part, whole, how="auto"):
    ring.reduce_scatter(part, whole, how)
    part.mul_(shards.place()[1])


def neighbours_part(part, whole, how="auto"):
    """Reduced to the wrong owner: an off-by-one in the ring."""
    ring.reduce_scatter(part, whole.roll(part.numel()), how)


def trained_padding(part, whole, how="auto"):
    """Padding that has a gradient: memory that nobody set to zero."""
    ring.reduce_scatter(part, whole, how)
    if shards.place()[0] == shards.place()[1] - 1:
        part[-1] += 0.05


def no_gather(self, async_op=False):
    """New shards stay with their owners."""


def gather_of_old(whole, part, async_op=False):
    """Each rank takes the others' shards for its own."""
    whole.copy_(part.repeat(whole.numel() // part.numel()))


def each_tie_apart(model, units=()):
    """A tied weight is two entries: its users are sharded, and trained, one without the other."""
    found = []
    for unit, entry in shards_entries(model, units):
        for name, place in zip(entry.names, entry.places, strict=True):
            parameter = torch.nn.Parameter(entry.parameter.detach().clone(), entry.parameter.requires_grad)
            setattr(*place, parameter)
            found.append((unit, shards.Entry(parameter, [name], [place])))
    return found


shards_entries = shards.entries


def no_broadcast(model):
    """Every rank starts from its own first weights."""


def whole_not_freed(self):
    """Freed weights are kept, and so never gathered again: the second step computes with the first one's."""


def forget(self, parameter):
    """Of several backward passes only the last one's gradient is kept."""
    if self.missing == 1:
        self.averaged = None
    arrived(self, parameter)


arrived = zero2.ShardedGradient.arrived


def own_norm(gradients, limit=None, alone=False):
    """The norm of this rank's part only."""
    return global_norm(gradients, limit, alone=True)


global_norm = shards.global_norm


@torch.no_grad()
def stale_load(model, state):
    """The model's own parameters are loaded, the shards that the optimizer trains are not."""
    for flat in shards.flats_of(model):
        for entry in flat.entries:
            entry.parameter.data.copy_(state[entry.names[0]])
    for name, tensor in shards.not_flat(model):
        tensor.copy_(state[name])


@contextlib.contextmanager
def no_regather():
    """Weights are freed after forward, and backward is not preceded by a gather."""
    before = zero3.Unit.before_backward

    def skip(self, gradient):
        fetch, self.fetch = self.fetch, lambda ahead: None
        before(self, gradient)
        self.fetch = fetch

    with mock.patch.object(zero3.Unit, "before_backward", skip):
        yield


NOTHING = ("zero3", {}, contextlib.nullcontext)  # the same run with nothing broken
MUTANTS = {
    "zero1 without a sum over the ranks": ("zero1", {}, replaced(zero1, "reduce_scatter", only_mine)),
    "zero2 without a sum over the ranks": ("zero2", {}, replaced(zero1, "reduce_scatter", only_mine)),
    "zero3 without a sum over the ranks": ("zero3", {}, replaced(zero3, "reduce_scatter", only_mine)),
    "zero1 sum instead of mean": ("zero1", {}, replaced(zero1, "reduce_scatter", sum_not_mean)),
    "zero2 sum instead of mean": ("zero2", {}, replaced(zero1, "reduce_scatter", sum_not_mean)),
    "zero3 sum instead of mean": ("zero3", {}, replaced(zero3, "reduce_scatter", sum_not_mean)),
    "zero2 reduced to the wrong owner": ("zero2", {}, replaced(zero1, "reduce_scatter", neighbours_part)),
    "zero1 padding trained": ("zero1", {}, replaced(zero1, "reduce_scatter", trained_padding)),
    "zero2 padding trained": ("zero2", {}, replaced(zero1, "reduce_scatter", trained_padding)),
    "zero3 padding trained": ("zero3", {}, replaced(zero3, "reduce_scatter", trained_padding)),
    "zero1 new weights not gathered": ("zero1", {}, replaced(zero1.Whole, "refresh", no_gather)),
    "zero2 new weights not gathered": ("zero2", {}, replaced(zero1.Whole, "refresh", no_gather)),
    "zero3 others' shards are not gathered": ("zero3", {}, replaced(shards, "all_gather", gather_of_old)),
    "zero3 regather skipped": ("zero3", {}, no_regather),
    "zero3 weights never freed": ("zero3", {}, replaced(zero3.FreedFlat, "free", whole_not_freed)),
    "zero1 tied weight sharded twice": ("zero1", {}, replaced(shards, "entries", each_tie_apart)),
    "zero2 tied weight sharded twice": ("zero2", {}, replaced(shards, "entries", each_tie_apart)),
    "zero3 tied weight sharded twice": ("zero3", {}, replaced(shards, "entries", each_tie_apart)),
    "zero3 first weights not broadcast": ("zero3", {}, replaced(shards, "broadcast", no_broadcast)),
    "zero2 forgets earlier passes": ("zero2", {}, replaced(zero2.ShardedGradient, "arrived", forget)),
    "zero1 clipped by the norm of a part": ("zero1", {}, replaced(watching, "global_norm", own_norm)),
}
