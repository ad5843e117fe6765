"""Kinds of model that readers write times all strategies: the gradients of two ranks are those of one process.

Tolerance: 1e-5 relative for each tensor; float32 sums in another order differ by some 1e-7.
"""

import weakref
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from chapter19_9.strategies import STRATEGIES, shards, zero3
from d2l_utils import launch
from tests.ranks import kind_functions as ranks

NAMES = [name for name in STRATEGIES if name != "single"]  # which averages nothing
DDP, FSDP1, FSDP2 = ("ddp", "zero_redundancy"), ("fsdp1", "fsdp1_grad_op"), ("fsdp2", "fsdp2_no_reshard")
OTHER = "other gradients"
# What PyTorch, or a strategy by its own account, does not do: {kind: {strategies: how that ends}}.
LIMITS = {
    "two backwards of one graph": {
        DDP: OTHER,  # gradients are averaged in the first backward after a forward, and in no other
        FSDP1: "storage of size 0",  # weights are gathered for one backward of a forward
    },
    "a block that is not used": {
        DDP: "parameters that were not used in producing loss",
        ("zero1",): "zeros for blocks.1.linear.bias, blocks.1.linear.weight",  # as its docstring says
    },
    # FSDP1 makes each dataclass anew, by its constructor
    "blocks return a dataclass with a computed field": {FSDP1: "no attribute 'aux'"},
    "the model returns a dataclass with a computed field": {FSDP1: "no attribute 'aux'"},
    # their hooks hang on the view alone, and are lost
    "a view that comes back is changed in place": {FSDP1: "expected to be in states", ("fsdp2",): "storage of size 0"},
    "one block twice in the list": {FSDP1: "are one tied weight in two units"},
    # their hooks hang on what a block returns, which is nothing; FSDP2 does not even say so
    "blocks change a dict that they are given": {
        ("fsdp1",): "storage of size 0",
        ("fsdp1_grad_op",): "expected to be in states",
        FSDP2: "none for blocks.0.linear.bias, blocks.0.linear.weight, blocks.1",
    },
    # FSDP2 hands a block views of its inputs
    "the input comes back changed in place": {FSDP2: "a view and is being modified inplace"},
}


@cache
def judged(kind):
    return ranks.judged(kind)


def outcome(found, expected):
    """How a rank ended: "" where its gradients are those of one process."""
    if isinstance(found, str):
        return found
    if expected.keys() - found.keys():
        return f"none for {', '.join(sorted(expected.keys() - found.keys()))}"
    if any(not (found[name] - tensor).norm() <= 1e-5 * tensor.norm() for name, tensor in expected.items()):
        return OTHER
    more = sorted(found.keys() - expected.keys())
    none = "zeros" if all(not found[name].any() for name in more) else "numbers"
    return f"{none} for {', '.join(more)}" if more else ""


@pytest.mark.parametrize("strategy", NAMES)
def test_gradients_are_those_of_one_process_for_every_kind_of_model(strategy):
    results = launch(ranks.gradients, world_size=ranks.RANKS, output="quiet", timeout=60, strategy=strategy).results
    limits = {k: end for k, ends in LIMITS.items() for strategies, end in ends.items() if strategy in strategies}
    for found in results:
        assert found.keys() == ranks.KINDS.keys()
        ends = {kind: end for kind, mine in found.items() if (end := outcome(mine, judged(kind)))}
        assert ends.keys() == limits.keys(), ends
        assert all(words in ends[kind] for kind, words in limits.items()), ends


def empty(model):
    """No unit of the model has its weights."""
    return all(flat.whole.untyped_storage().nbytes() == 0 for flat in shards.flats_of(model))


def test_a_complex_parameter_is_refused_by_name():
    """Its imaginary part would be lost."""
    for strategy in ("zero1", "zero2", "zero3"):
        model = ranks.made("tensor")
        model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"^phase is a parameter of complex64: a flat vector takes floating-point"):
            STRATEGIES[strategy].load().shard(model, ranks.CPU)


def generator(x, aux):
    yield from (x, aux)


class Slots:
    __slots__ = ("aux", "x")

    def __init__(self, x, aux):
        self.x, self.aux = x, aux


HIDING = {
    "SimpleNamespace": lambda x, aux: SimpleNamespace(x=x, aux=aux),
    "function": lambda x, aux: lambda: (x, aux),
    "generator": generator,
    "Slots": lambda x, aux: (x, [Slots(x, aux)]),
}


@pytest.mark.parametrize("kind", HIDING)
def test_zero3_refuses_in_forward_what_could_hide_a_tensor_and_names_block_and_type(kind):
    block = zero3.shard(ranks.Model([ranks.Block(), ranks.Block(HIDING[kind])], itself), ranks.CPU)
    whole = zero3.shard(ranks.Model([ranks.Block()], give=HIDING[kind]), ranks.CPU)
    for model, name in ((block, "block 'blocks.1'"), (whole, "the model")):
        with pytest.raises(TypeError, match=rf"^{name} returns a {kind}: .* Return tensors, or tuples"):
            model(ranks.batch(0))
        assert empty(model)


def itself(value):
    return value, 0.0


@pytest.mark.parametrize("kind", ["tensor", "blocks return a dict", "the model returns a dataclass"])
def test_zero3_without_gradients_computes_the_same_and_frees(kind):
    _, loss, _ = ranks.KINDS[kind]
    plain, model = ranks.made(kind), zero3.shard(ranks.made(kind), ranks.CPU)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert loss(model.eval()(ranks.batch(0))).equal(loss(plain.eval()(ranks.batch(0))))
        assert empty(model)
    loss(model(ranks.batch(0))).backward()
    assert empty(model)


def test_zero3_gathers_no_block_again_for_an_input_that_it_handed_on(monkeypatch):
    """Its gradient comes when the block's own backward is over: the weights would stay until the end of all."""
    model, fetched = zero3.shard(ranks.made("the input comes back beside the result"), ranks.CPU), []
    loss = model(ranks.batch(0))
    monkeypatch.setattr(zero3.FreedFlat, "fetch", lambda flat: fetched.append(flat.unit) or fetch(flat))
    loss.backward()
    assert fetched == ["", "blocks.1", "blocks.0"]


fetch = zero3.FreedFlat.fetch


def test_zero3_keeps_no_input_of_a_block_alive():
    class Looks(ranks.Block):
        def forward(self, x):
            self.seen = weakref.ref(x)
            return super().forward(x)

    model = zero3.shard(ranks.Model([Looks()]), ranks.CPU)
    model(ranks.batch(0)).backward()
    assert model.blocks[0].seen() is None


def test_without_gradients_a_block_may_return_anything():
    model = zero3.shard(ranks.Model([ranks.Block()], give=HIDING["SimpleNamespace"]), ranks.CPU)
    with torch.no_grad():
        assert model(ranks.batch(0)).x > 0
