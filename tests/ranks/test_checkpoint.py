"""Save on 4 ranks, resume on 2 and on 1: the training that never stopped, for every strategy; a crash while saving; and
torchrun's restart.

Tolerance: 1e-5 relative to one process that never stopped; float32 sums in another order differ by some 1e-7.
"""

import os

import pytest

from chapter19_9.resuming import view
from chapter19_9.resuming.checkpoint import Checkpoints, newest
from chapter19_9.resuming.trouble import killed_while_saving
from chapter19_9.train import train
from d2l_utils import LaunchError, launch
from d2l_utils.agree import relative_difference
from d2l_utils.transformer import TransformerConfig
from tests.ranks import checkpoint_functions as ranks

EVEN = TransformerConfig(layers=2, width=32, heads=2, length=16)
# nothing divides by 4; one weight in two places; one that is not trained
ODD = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
NAMES = ["ddp", "zero1", "zero2", "zero3", "zero_redundancy", "fsdp1", "fsdp2"]
MOVES = [("zero3", "fsdp2"), ("fsdp2", "zero3"), ("zero_redundancy", "zero2"), ("fsdp1", "ddp")]  # (resumed, saved) by
CUT = ["ddp", "fsdp2", "zero3"]
SAVED, STEPS, TOLERANCE = 3, 6, 1e-5
SETTINGS = {"config": ODD, "steps": STEPS, "batch": 12, "lr": 1e-2}


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=200, **arguments).results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What 4 ranks saved under every strategy, and under some with another model."""
    place = str(tmp_path_factory.mktemp("saved"))
    runs = {name: (name, name, False, {}) for name in NAMES}
    runs |= {f"even {name}": (name, f"even {name}", False, {"config": EVEN}) for name in CUT}
    run(ranks.train_all, 4, runs=runs, folder=place, every=SAVED, **SETTINGS | {"steps": SAVED})
    return place


@pytest.fixture(scope="module")
def resumed(folder):
    """{world size: {run: rank 0's result}}, and the training that never stopped as "never"."""
    runs = {name: (name, name, False, {}) for name in NAMES}
    weights_only = {f"weights {name}": (name, name, True, {}) for name in ("ddp", "zero3")}
    moves = {f"{saved} to {name}": (name, saved, False, {}) for name, saved in MOVES}
    alone = {"zero3 to single": ("single", "zero3", False, {}), "never": ("single", "nothing", False, {})}
    settings = SETTINGS | {"folder": folder, "weights": True}
    return {
        2: run(ranks.train_all, 2, runs=runs | weights_only | moves, **settings)[0],
        1: run(ranks.train_all, 1, runs=runs | alone, **settings)[0],
    }


def assert_goes_on(result, never):
    assert (result.first, len(result.losses)) == (SAVED, STEPS - SAVED)
    assert result.losses == pytest.approx(never.losses[SAVED:], rel=TOLERANCE)
    assert relative_difference(result.weights, never.weights) < TOLERANCE
    assert result.agree
    assert result.changed


@pytest.mark.parametrize("n", [2, 1])
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_as_if_it_had_never_stopped(resumed, name, n):
    assert_goes_on(resumed[n][name], resumed[1]["never"])


@pytest.mark.parametrize("move", [*(f"{saved} to {name}" for name, saved in MOVES), "zero3 to single"])
def test_a_checkpoint_knows_no_strategy(resumed, move):
    assert_goes_on(resumed[1 if "single" in move else 2][move], resumed[1]["never"])


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_weights_alone_begin_right_and_go_another_way(resumed, name):
    result, never = resumed[2][f"weights {name}"], resumed[1]["never"]
    assert result.losses[0] == pytest.approx(never.losses[SAVED], rel=TOLERANCE)
    assert view.apart(result, never) > 1e-2


@pytest.mark.parametrize("name", CUT)
def test_every_number_is_in_one_file_and_every_rank_has_its_share(folder, name):
    path = newest(f"{folder}/even {name}")
    assert path.name == f"step-{SAVED:06}"
    assert sorted(file.name for file in path.iterdir()) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    states = 12 * EVEN.parameter_count
    wrote = view.per_rank(path, 4)
    assert sum(wrote) == states
    assert max(wrote) < (1.2 if name == "ddp" else 1.01) * states / 4


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_rank_killed_while_saving_is_restarted_and_nothing_is_lost(resumed, tmp_path, strategy):
    place = Checkpoints(str(tmp_path), every=2)
    done = launch(
        killed_while_saving, world_size=2, restarts=1, output="quiet", step=4, checkpoints=place, strategy=strategy,
        **SETTINGS,
    )  # fmt: skip
    for life, found, result in done.results:
        assert (life, found, result.first) == (1, ["step-000002", "step-000004.draft"], 2)
        assert result.losses == pytest.approx(resumed[1]["never"].losses[2:], rel=TOLERANCE)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000004", "step-000006"]
    assert "--max-restarts=1" in done.command


def test_without_restarts_the_launch_fails_and_the_checkpoint_before_is_good(resumed, tmp_path):
    settings = SETTINGS | {"strategy": "zero3", "checkpoints": Checkpoints(str(tmp_path), every=2)}
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        run(killed_while_saving, 2, step=4, **settings)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000004.draft"]
    result = run(train, 1, **settings)[0]
    assert result.first == 2
    assert result.losses == pytest.approx(resumed[1]["never"].losses[2:], rel=TOLERANCE)


def test_a_damaged_checkpoint_stops_every_rank_before_the_first_step(folder):
    path = newest(f"{folder}/even ddp")
    os.truncate(path / "__1_0.distcp", 1000)
    settings = SETTINGS | {"config": EVEN, "checkpoints": Checkpoints(f"{folder}/even ddp")}
    with pytest.raises(LaunchError, match=r"ValueError: .*step-000003/__1_0.distcp has 1,000 of .* bytes") as caught:
        run(train, 2, strategy="ddp", **settings)
    assert "1 other rank failed in the same way" in caught.value.message


def test_restarted_ranks_know_their_life(way):
    done = launch(ranks.dies, world_size=2, restarts=1, output="quiet", how="kill")
    assert done.results == [1, 1]
    assert done.output == ["life 0\nlife 1\n"] * 2
    assert not done.late_failures


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "rank 1 failed: ValueError: in life 1"), ("kill", "rank 1 was killed by SIGKILL")],
)
def test_when_restarts_are_used_up_the_last_life_s_error_is_told(how, words):
    with pytest.raises(LaunchError) as caught:
        launch(ranks.dies, world_size=2, restarts=1, output="quiet", how=how, lives=2)
    assert caught.value.message.startswith(words)
    assert caught.value.output[1] == "life 0\nlife 1\n"


def test_a_rank_that_fails_after_all_have_delivered_restarts_nothing():
    done = launch(ranks.dies, world_size=2, restarts=1, output="quiet", how="late")
    assert done.results == [0, 0]
    assert done.output == ["life 0\n"] * 2
    assert done.late_failures == {1: "SIGABRT"}


def test_what_a_life_delivered_is_forgotten_in_the_next():
    with pytest.raises(LaunchError) as caught:
        launch(ranks.dies, world_size=2, restarts=1, output="quiet", how="early", lives=2)
    assert caught.value.message.startswith("rank 1 failed: ValueError: in life 1")
    assert caught.value.results == [None, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"restarts": -1}, "restarts is -1: allowed is a whole number from 0 to 10"),
        ({"restarts": True}, "restarts is True: allowed is a whole number from 0 to 10"),
        ({"restarts": 1, "nodes": 2}, "restarts is 1: with nodes=2 allowed is 0"),
    ],
)
def test_restarts_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        launch(ranks.dies, world_size=2, how="kill", **arguments)
