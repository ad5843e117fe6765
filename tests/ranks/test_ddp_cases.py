"""Mistakes that people make with DDP: the symptom as it is, what the chapter's checks say, and the cure."""

import math
import time

import pytest
import torch
from torch import nn

from chapter19_9.train import forward_backward
from d2l_utils import LaunchError, launch
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig
from tests.ranks import ddp_functions as ranks


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=60, **arguments).results


def test_D02_calling_module_goes_past_ddp_and_the_ranks_no_longer_agree():
    past = run(ranks.past_ddp, 3, through_ddp=False)
    assert [gradient for gradient, _, _ in past] == [1.0, 2.0, 3.0]
    assert [agree for _, agree, _ in past] == [False] * 3
    assert [difference for _, _, difference in past] == pytest.approx([0.2] * 3)
    through = run(ranks.past_ddp, 3, through_ddp=True)
    assert through == [(2.0, True, 0.0)] * 3


def test_D03_an_unused_layer_stops_the_second_step_and_the_check_names_it_after_the_first():
    step, error, said = run(ranks.unused_layer, 2, find=False)[1]
    assert step == 1
    assert "find_unused_parameters=True" in error
    assert "no gradient for 'unused.weight'" in said
    assert "find_unused_parameters=True" in said
    assert run(ranks.unused_layer, 2, find=True)[1][0] is None


def test_D04_different_numbers_of_batches_are_an_error_before_the_loop_and_join_trains_them():
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"ValueError: batches differs between the ranks: \[3, 4, 5\]"):
        run(ranks.uneven_batches, 3, how="check")
    # unchecked: an error, not a wait until the limit
    with pytest.raises(LaunchError, match="rank 1") as caught:
        run(ranks.uneven_batches, 2, how="nothing")
    assert "timed out" not in str(caught.value)
    assert time.monotonic() - begun < 60
    assert run(ranks.uneven_batches, 3, how="join") == [(3, True), (4, True), (5, True)]


def test_D05_padding_draws_some_samples_twice_and_the_distinct_mean_does_not():
    results = run(ranks.sampled, 3, size=10, epochs=1, set_epoch=False, shuffle=False)
    assert results[2][0] == [[2, 5, 8, 1]]
    assert sum(len(drawn[0]) for drawn, _, _ in results) == 12
    for _, padded, distinct in results:
        assert padded == pytest.approx(46 / 12)
        assert distinct == 4.5


@pytest.mark.parametrize(
    ("size", "drop_last", "message"),
    [
        (2, True, "a dataset of 2 samples over 3 ranks with drop_last=True leaves each rank none"),
        (0, False, "a dataset of 0 samples over 3 ranks leaves each rank none"),
    ],
)
def test_D06_an_empty_part_is_refused(size, drop_last, message):
    with pytest.raises(LaunchError, match="ValueError") as caught:
        run(ranks.sampled, 3, size=size, epochs=1, set_epoch=False, shuffle=False, drop_last=drop_last)
    assert message in str(caught.value)


def test_D06_fewer_samples_than_ranks_are_padded():
    results = run(ranks.sampled, 3, size=2, epochs=1, set_epoch=False, shuffle=False)
    assert [drawn for drawn, _, _ in results] == [[[0]], [[1]], [[0]]]
    assert results[0][2] == 0.5


@pytest.mark.parametrize("set_epoch", [False, True])
def test_D07_set_epoch_changes_the_order_and_all_ranks_share_it(set_epoch):
    results = run(ranks.sampled, 3, size=12, epochs=2, set_epoch=set_epoch, shuffle=True)
    first, second = ([drawn[epoch] for drawn, _, _ in results] for epoch in range(2))
    assert (first != second) == set_epoch
    for epoch in (first, second):
        assert sorted(index for part in epoch for index in part) == list(range(12))


def test_D09_a_summed_loss_gives_a_part_of_the_gradient_and_times_N_mends_it():
    alone = run(ranks.loss_of, 1, reduction="sum")[0]
    assert run(ranks.loss_of, 2, reduction="sum")[0] / alone == pytest.approx(0.5)
    assert run(ranks.loss_of, 2, reduction="sum", scale=2.0)[0] == pytest.approx(alone)
    mean = run(ranks.loss_of, 1, reduction="mean")[0]
    assert run(ranks.loss_of, 4, reduction="mean")[0] == pytest.approx(mean)


@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [1, 3]])
def test_D10_micro_batches_are_weighted_by_their_size(parts):
    config = TransformerConfig(layers=1, width=16, heads=2, length=16)
    rows = sequences(16, 4)

    def gradient(how):
        model = Transformer(config)
        how(model, rows[:, :-1], rows[:, 1:])
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    def by_number(model, tokens, targets):
        for x, y in zip(tokens.split(parts), targets.split(parts), strict=True):
            (model(x, y) / len(parts)).backward()

    whole = gradient(lambda model, x, y: model(x, y).backward())
    weighted = gradient(lambda model, x, y: forward_backward(model, x, y, parts))
    divided = gradient(by_number)
    assert (weighted - whole).norm() < 1e-6 * whole.norm()
    equal = len(set(parts)) == 1
    assert ((divided - whole).norm() < 1e-6 * whole.norm()) == equal
    if not equal:
        assert (divided - whole).norm() > 0.05 * whole.norm()


@pytest.mark.parametrize("parts", [[], [3], [0, 4], [2, 3]])
def test_parts_that_are_not_the_whole_are_refused(parts):
    with pytest.raises(ValueError, match="add up to 4 samples"):
        forward_backward(nn.Identity(), torch.zeros(4, 2), torch.zeros(4, 2), parts)


def test_D13_batchnorm_buffers_differ_and_ddp_copies_those_of_rank_0_at_the_next_forward():
    results = run(ranks.buffers, 2)
    after_one = [seen[0] for seen in results]
    assert [mean for mean, *_ in after_one] == pytest.approx([0.1, 0.2])
    after_two = [seen[1] for seen in results]
    # rank 1 went on from rank 0's 0.1, not from its own 0.2
    assert [mean for mean, *_ in after_two] == pytest.approx([0.9 * 0.1 + 0.1 * 1, 0.9 * 0.1 + 0.1 * 2])
    for _, buffers_agree, parameters_agree, module_agrees in after_one + after_two:
        assert not buffers_agree
        assert parameters_agree
        assert not module_agrees  # of a module the buffers count too


def test_an_optimizer_for_old_weights_is_refused():
    with pytest.raises(LaunchError, match=r"does not hold 1 of the model's parameters, such as 'module\.weight'"):
        run(ranks.stale_optimizer, 2)


def test_averaging_by_hand_without_a_gradient_is_an_error_not_a_wait():
    with pytest.raises(LaunchError, match="no gradient for 'weight'"):
        run(ranks.one_without_gradient, 2)


def test_gradients_live_inside_the_buckets():
    gradients, storages, peak, whole = run(ranks.gradient_storages, 2)[0]
    assert (gradients, storages) == (4, 1)
    assert peak < whole  # DDP's own default takes the gradients a second time


def test_differences_between_ranks():
    same, apart = [[1.0, 2.0]], [[1.0, 2.5]]
    assert run(ranks.differences, 2, values=[same, same]) == [(0.0, True)] * 2
    assert run(ranks.differences, 2, values=[same, apart]) == [(0.5, False)] * 2
    assert run(ranks.differences, 2, values=[[[1.0, -2.0]], [[1.0, 2.0]]]) == [(4.0, False)] * 2
    assert run(ranks.differences, 2, values=[[], []]) == [(0.0, True)] * 2
    for odd in (math.nan, math.inf, -math.inf):
        broken = run(ranks.differences, 2, values=[[[1.0, odd]], same])
        assert all(math.isnan(difference) and not agree for difference, agree in broken)
    with pytest.raises(LaunchError, match="tensors have different shapes on different ranks"):
        run(ranks.differences, 2, values=[same, [[1.0]]])
