"""What people meet with FSDP1 and FSDP2: the symptom as it is, what the chapter says of it, and the cure."""

import pytest
import torch

from chapter19_9 import theory
from chapter19_9.checks import check_averages
from chapter19_9.strategies import STRATEGIES
from chapter19_9.train import train
from d2l_utils import LaunchError, launch
from d2l_utils.transformer import Transformer, TransformerConfig
from tests.ranks import fsdp_functions as ranks

GPU = torch.accelerator.is_available()


def run(function, world_size, timeout=60, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=timeout, **arguments).results


@pytest.mark.skipif(GPU, reason="the error is that there is no accelerator")
def test_F01_fsdp1_on_the_cpu_needs_its_device_said():
    for bare, norm in run(ranks.without_a_device, 2):
        assert "non-CPU accelerator" in bare
        assert norm > 0


def test_F04_a_wrap_policy_that_splits_a_tied_weight_is_refused_with_both_names():
    (wrong, same), (_, nothing) = run(ranks.tied_in_two_units, 2)
    assert "'tokens.weight' and 'head.weight' are one tied weight in two units, 'tokens' and 'the model'" in wrong
    assert (same, nothing) == ([True], [])


def test_F05_F07_the_full_state_dict_is_on_rank_0_only_and_takes_all_ranks():
    (first, ours, old, new), (second, empty, _, _) = run(ranks.saved, 2, everywhere=True)
    assert len(first) == len(ours) == 27
    assert second == empty == []
    assert any("FSDP.state_dict_type()" in warning for warning in old)  # deprecated: ours does not go through it
    assert new == []


def test_F05_asked_for_on_rank_0_alone_it_waits_until_the_limit():
    with pytest.raises(LaunchError) as caught:
        run(ranks.saved, 2, timeout=6, everywhere=False)
    assert "6" in str(caught.value)


def test_F07_H03_training_warns_of_nothing_at_any_world_size():
    strategies = ["zero1", "zero2", "zero3", "zero_redundancy", "fsdp1", "fsdp1_grad_op", "fsdp2"]
    for n in (1, 2):
        assert run(ranks.warned, n, names=strategies) == [[]] * n
    # the old names do, on a torch that has new ones
    assert run(ranks.old_names, 2)[0] in (None, ["FutureWarning"])


def test_G01_root_only_gathers_everything_at_once():
    config = TransformerConfig(layers=3, width=32, heads=2, length=16)
    shapes = theory.shapes(config)
    whole = 4 * sum(shape.numel for shape in shapes)
    gathers = {}
    for name in ("fsdp2", "fsdp2_no_reshard", "fsdp2_root_only"):
        result = run(train, 2, strategy=name, config=config, steps=2, batch=4, record_step=1)[0]
        gathers[name] = [event.bytes for event in result.recording.events if event.name == "all_gather"]
    assert gathers["fsdp2_root_only"] == [whole]
    assert len(gathers["fsdp2_no_reshard"]) == 4  # three blocks and the root
    assert len(gathers["fsdp2"]) == 8
    assert max(gathers["fsdp2"]) < whole / 2
    assert sum(gathers["fsdp2_no_reshard"]) == whole


def test_G05_a_tied_weight_belongs_in_one_unit():
    plain, root, apart, only_one, together, ours = run(ranks.tied_groups, 2)[0]
    assert root == together == ours == pytest.approx(plain, rel=1e-6)
    for error, meaning in (apart, only_one):
        assert error.startswith("ValueError")
        assert "fully_shard([one, other])" in meaning


def test_G06_rows_that_do_not_divide_leave_small_and_empty_shards():
    results = run(ranks.uneven_rows, 3)
    assert [shapes for shapes, *_ in results] == [
        [[2, 3], [2], [1, 5], [1]],
        [[2, 3], [2], [0, 5], [0]],
        [[1, 3], [1], [0, 5], [0]],
    ]
    # stored as if each chunk were the largest: 6 + 2 + 5 + 1 elements; needed are fewer
    assert [held for _, held, _, _ in results] == [4 * 14] * 3
    assert [needed for _, _, needed, _ in results] == [4 * 14, 4 * 8, 4 * 4]
    assert max(apart for *_, apart in results) < 1e-6


def test_G08_a_child_of_a_sharded_module_cannot_be_called_alone():
    error, meaning = run(ranks.called_inside, 2)[0]
    assert "mixed torch.Tensor and DTensor" in error
    assert "Call that one" in meaning


def test_G09_a_plain_state_dict_goes_in_with_set_model_state_dict():
    (wrong, expected, new, old, same), (_, _, _, _, nothing) = run(ranks.loaded, 2)
    assert "mixed torch.Tensor and DTensor" in wrong[0]
    assert "set_model_state_dict" in wrong[1]
    assert new == old == pytest.approx(expected, rel=1e-6)
    assert (same, nothing) == (True, None)


def test_G10_what_is_whole_after_forward_depends_on_the_root_setting():
    outer = ["head", "norm", "positions", "tokens"]
    found = {root: run(ranks.after_forward, 2, root=root)[0] for root in (True, False, None)}
    assert found[True] == ([], [], [])
    assert found[False] == found[None] == ([], outer, [])


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_a_model_that_is_sharded_already_is_refused(name):
    for again, outside in run(ranks.sharded_twice, 2, strategy=name):
        assert again == "ValueError: this model is already sharded (as a whole): make a new one and shard it once"
        assert outside == "ValueError: this model is already sharded (1): make a new one and shard it once"


@pytest.mark.parametrize(
    ("function", "torch_says", "it_means"),
    [
        ("root_before_child", "TypeError: Invariant encountered", "Shard the children first, and the root last."),
        ("sharded_then_wrapped", "Operator c10d.broadcast_", "this model is already sharded"),
        ("gathered_once", "out of bounds for storage of size 0", "the weights were freed and not gathered again"),
        ("without_its_device", "non-CPU accelerator", "device_id=rank_device()"),
    ],
)
def test_what_an_error_of_torch_means_stands_under_it(function, torch_says, it_means):
    with pytest.raises(LaunchError) as caught:
        run(getattr(ranks, function), 2)
    head, *below = caught.value.message.splitlines()
    assert torch_says in head and "What it means" not in head
    assert sum(line.startswith("What it means: ") and it_means in line for line in below) == 1, below


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "ddp"])
def test_gradients_that_wait_are_not_taken_for_unused_ones(strategy):
    """FSDP1's and DDP's own gradients are there while they wait; FSDP1's empty shard of a bias never has one."""
    for inside, after, whole in run(ranks.waiting, 2, strategy=strategy):
        if strategy == "fsdp2":
            assert f"the gradients of 'weight', 'bias' wait unsharded on this rank ({whole} B)" in inside
            assert "set_requires_gradient_sync(True)" in inside and "find_unused_parameters" not in inside
        else:
            assert inside == ""
        assert after == ""


def test_a_training_that_changed_no_weight_is_an_error_with_its_cause():
    with pytest.raises(
        LaunchError, match=r"RuntimeError: 2 steps at lr=0.001 changed no weight: gradients wait unsharded"
    ):
        run(ranks.trained_waiting, 2)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_an_average_that_is_a_sum_is_an_error_before_the_first_step(collective):
    for said, steps in run(ranks.sums, 2, collective=collective):
        assert said.startswith(f"RuntimeError: {collective} with ReduceOp.AVG is wrong in this PyTorch (")
        assert "of the numbers 1 to 2 it gave 3, right is 1.5. Gradients would be 2 times" in said
        assert steps == []


def test_a_reader_can_launch_the_check_of_averages():
    right = {"reduce_scatter SUM": 6.0, "all_reduce SUM": 6.0, "reduce_scatter AVG": 2.0, "all_reduce AVG": 2.0}
    assert run(check_averages, 3) == [right] * 3


def test_the_check_of_averages_is_in_no_recorded_step():
    for first, later in run(ranks.recorded_first_step, 2):
        assert first == later


def test_fsdp1_clips_by_its_own_method_and_the_others_by_the_function():
    plain, (x, y) = Transformer(ranks.CONFIG), ranks.text(4)
    plain(x, y).backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    first, second = run(ranks.norms, 2)
    for call in ("nn.utils, ddp", "nn.utils, fsdp2", "model's, fsdp1"):
        assert first[call] == pytest.approx(whole, rel=1e-5) == second[call]
    parts = first["nn.utils, fsdp1"], second["nn.utils, fsdp1"]
    assert max(parts) < 0.99 * whole
    assert sum(part**2 for part in parts) == pytest.approx(whole**2, rel=1e-5)
