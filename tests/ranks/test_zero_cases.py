"""Hand-written ZeRO on awkward models against plain torch, and what people meet with ZeRO."""

from functools import cache

import pytest
import torch
from torch import nn

from chapter19_9.strategies import shards, zero1, zero2, zero3
from d2l_utils import LaunchError, launch
from d2l_utils.launching.meanings import explained
from d2l_utils.transformer import Transformer, TransformerConfig
from tests.ranks import zero_functions as ranks

CPU = torch.device("cpu")


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=60, **arguments).results


@cache
def plain(kind):
    return run(ranks.plain, 1, kind=kind)[0]


def assert_close(mine, other, tolerance=1e-5):
    assert mine.keys() == other.keys()
    for name in other:
        assert mine[name].shape == other[name].shape
        assert (mine[name] - other[name]).norm() <= tolerance * max(other[name].norm(), 1e-3), name


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_awkward_models_in_groups_with_adamw_and_momentum_are_plain_torch(n):
    """Scalars, ties in and across units, frozen parts, two parameter groups, clipping; first weights differ by rank."""
    results = run(ranks.awkward, n, prefetch=n == 3)
    for rank, found in enumerate(results):
        assert len(found) == 6
        for key, (losses, norms, gradients, state, agree) in found.items():
            expected = plain(key.split()[1])
            assert losses == pytest.approx(expected[0], rel=1e-5), key
            assert norms == pytest.approx(expected[1], rel=1e-5), key
            assert min(norms) > 0.4  # the limit was reached in every step
            assert agree
            # H05: both names of a tied weight, one value; the whole state dict on the last rank only
            if rank == n - 1:
                assert_close(state, expected[3])
                assert state["head.weight"].equal(state["tokens.weight"])
                assert state["blocks.1.outer.weight"].equal(state["blocks.3.outer.weight"])
            else:
                assert state == {}
            # torch's clipping has scaled these in place, as ours has
            assert_close(gradients, expected[2])


def test_loading_the_unsharded_model_reaches_shards_wholes_and_masters():
    for found in run(ranks.reloaded, 3):
        for name in ranks.BY_HAND:
            assert found[name] == pytest.approx(found["plain"], rel=1e-5), name
    for found in run(ranks.reloaded, 3, dtype="bfloat16"):
        for name in ranks.BY_HAND:
            assert found[name] == pytest.approx(found["plain"], rel=2e-2), name


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_way_to_reduce_scatter_gives_the_sum_and_leaves_its_input(n):
    for rank, parts in enumerate(run(ranks.scattered, n, n_elements=3)):
        expected = [n * (n + 1) / 2 * (3 * rank + i) for i in range(3)]
        for how, (apart, in_place, untouched) in parts.items():
            assert apart == in_place == expected, how
            assert untouched


def test_Z01_the_state_dict_exists_after_consolidation_and_on_one_rank_only():
    (before, first), (before_too, second) = run(ranks.consolidated, 2)
    assert "consolidate_state_dict" in before
    assert "consolidate_state_dict" in before_too
    assert "consolidate_state_dict" in first
    assert second == 2


def test_Z03_fewer_parameters_than_ranks_leaves_ranks_with_nothing():
    results = run(ranks.shares, 3, rows=4, columns=4, others=0)
    assert [zero[0] for zero, _ in results] == [8 * 16 + 4, 0, 0]
    # flat shards of 6 elements each, the last with two of padding
    assert [flat[0] for _, flat in results] == [8 * 6 + 4] * 3


def test_Z05_whole_tensors_are_not_split_so_one_rank_has_the_large_one():
    results = run(ranks.shares, 4, rows=90, columns=10, others=1)
    assert [zero[0] for zero, _ in results] == [8 * 900 + 4, 8 * 100 + 4, 0, 0]
    assert [flat[0] for _, flat in results] == [8 * 250 + 4] * 4
    assert {zero[1] for zero, _ in results} == {4 * 1000}


def test_H01_a_weight_that_was_freed_and_not_gathered_again_fails_in_backward():
    """The mistake as people make it; then zero3 without its regathering; then zero3."""
    layer = nn.Linear(3, 5, bias=False)
    out = layer(torch.ones(2, 3, requires_grad=True)).sum()
    layer.weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"size|shape|invalid gradient") as caught:
        out.backward()
    assert explained(caught.value) is not None, caught.value

    config = TransformerConfig(layers=1, width=8, heads=2, length=4)
    model = zero3.shard(Transformer(config), CPU)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    loss = model(tokens, tokens)
    for flat in shards.flats_of(model):
        flat.fetch = lambda: None
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert "freed and not gathered again" in explained(caught.value)

    model = zero3.shard(Transformer(config), CPU)
    model(tokens, tokens).backward()
    assert all(flat.shard.grad is not None for flat in shards.flats_of(model))
    assert all(flat.whole.untyped_storage().nbytes() == 0 for flat in shards.flats_of(model))


def test_H03_no_renamed_collective_is_called():
    assert run(ranks.new_names_only, 2) == [[], []]


def test_a_block_that_forward_leaves_out_is_named():
    with pytest.raises(LaunchError, match=r"ValueError: no gradient for 'blocks.1.outer.weight'") as caught:
        run(ranks.unused, 2, strategy="zero2")
    assert "freeze or remove them" in str(caught.value)


def test_an_optimizer_made_before_sharding_is_refused():
    with pytest.raises(LaunchError, match=r"ValueError: the optimizer does not hold 4 .* make it after shard"):
        run(ranks.too_early, 2, strategy="zero3")


@pytest.mark.parametrize("strategy", [zero1, zero2])
def test_a_learning_rate_scheduler_goes_on_the_optimizer_inside(strategy):
    model = strategy.shard(Transformer(TransformerConfig(layers=1, width=16, length=8)), CPU)
    optimizer = strategy.optimizer(model, 1e-3, make=torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optim, lambda step: 1.0 if step == 0 else 0.0)
    moved = []
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(torch.arange(8)[None], torch.arange(8)[None]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        moved.append(any(not a.equal(b) for a, b in zip(before, model.parameters(), strict=True)))
    assert moved == [True, False]


def test_words_of_the_vocabulary():
    layout = shards.Layout((torch.Size([]), torch.Size([3, 5]), torch.Size([2])), 4)
    assert (layout.numel, layout.shard, layout.padding) == (18, 5, 2)
    tensors = [torch.tensor(7.0), torch.arange(15.0).view(3, 5), torch.tensor([8.0, 9.0])]
    flat = layout.pack(tensors)
    assert flat.tolist() == [7.0, *range(15), 8.0, 9.0, 0.0, 0.0]
    for tensor, view in zip(tensors, layout.unpack(flat), strict=True):
        assert view.equal(tensor)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert layout.own(flat).tolist() == [7.0, 0.0, 1.0, 2.0, 3.0]


def test_misuse_says_what_to_do():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="model is not sharded: call this strategy's shard"):
        zero1.optimizer(model, 0.1)
    model = zero1.shard(model, CPU)
    with pytest.raises(ValueError, match="options has 'x': the groups are None"):
        zero1.optimizer(model, 0.1, options={"x": {}})
    with pytest.raises(ValueError, match="to is 3: it must be a rank from 0 to 0"):
        zero1.full_state_dict(model, to=3)
    with pytest.raises(ValueError, match=r"state\['weight'\] is \(3, 2\): it must have shape \(2, 2\)"):
        zero1.load_full(model, nn.Linear(2, 3).state_dict())
    with pytest.raises(ValueError, match=r"state\['weight'\] is missing"):
        zero1.load_full(model, {})
