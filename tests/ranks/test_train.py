"""DDP on N ranks against one process on the whole batch: losses, gradients, weights, and what a step costs.

First weights differ by rank, so a missing broadcast fails. Tolerance: 1e-5 relative; float32 sums in another
order differ by some 1e-7.
"""

import re

import pytest
import torch

from chapter19_9 import theory
from chapter19_9.compare import compare, main, table
from chapter19_9.snapshots import measure
from chapter19_9.train import train
from d2l_utils import LaunchError, launch
from d2l_utils.link import Link
from d2l_utils.memory import Sizes
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=2, width=32, heads=2, length=32)
TIED = TransformerConfig(layers=2, width=32, heads=2, length=32, tied=True, frozen=True)
STEPS, BATCH = 4, 24
TOLERANCE = 1e-5


def run(world_size, **arguments):
    settings = {"steps": STEPS, "batch": BATCH, "weights": True, "config": CONFIG}
    done = launch(train, world_size=world_size, output="quiet", **{**settings, **arguments})
    assert None not in done.results, (done.folder, done.late_failures, done.output)
    return done.results


@pytest.fixture(scope="module")
def reference():
    """One process, plain model, whole batch; made once for each config."""
    made = {}

    def get(config):
        if config not in made:
            made[config] = run(1, strategy="single", config=config)[0]
        return made[config]

    return get


def by_hand():
    """The loop written out in plain torch: (losses, weights)."""
    model = Transformer(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        rows = sequences(CONFIG.length, BATCH, offset=step * BATCH)
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def assert_same(result, expected):
    """Losses, norms, gradients and weights, each tensor relative to its own norm."""
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.gradient_norms == pytest.approx(expected.gradient_norms, rel=TOLERANCE)
    for kind in ("gradients", "weights"):
        mine, other = getattr(result, kind), getattr(expected, kind)
        assert mine.keys() == other.keys()
        for name in mine:
            assert (mine[name] - other[name]).norm() <= TOLERANCE * other[name].norm(), (kind, name)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["plain", "tied and frozen"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ddp_is_one_process_on_the_whole_batch(reference, n, config):
    results = run(n, strategy="ddp", config=config, seed_by_rank=True, bucket_mb=0.02)
    for rank, result in enumerate(results):
        assert (result.rank, result.world_size) == (rank, n)
        assert result.agree
        assert result.changed
        assert_same(result, reference(config))
    assert ("positions.weight" in results[0].gradients) == (not config.frozen)


def test_the_reference_is_the_plain_loop(reference):
    losses, weights = by_hand()
    result = reference(CONFIG)
    assert result.losses == pytest.approx(losses, rel=TOLERANCE)
    for name, weight in weights.items():
        assert (result.weights[name] - weight).norm() <= TOLERANCE * weight.norm(), name


@pytest.mark.parametrize("sync_every", [False, True])
def test_accumulation_changes_nothing_but_the_number_of_exchanges(reference, sync_every):
    results = run(2, strategy="ddp", accumulation=3, sync_every=sync_every, seed_by_rank=True, record_step=STEPS - 1)
    assert_same(results[1], reference(CONFIG))
    sent = sum(event.sent_bytes for event in results[0].recording.events if event.kind == "collective")
    assert sent == (3 if sync_every else 1) * theory.volume("ddp", theory.adamw_states(CONFIG), 2)


@pytest.mark.parametrize("n", [2, 3])
def test_without_averaging_the_ranks_drift_and_with_it_they_do_not(reference, n):
    alone = run(n, strategy="single", differences=True)
    grows = alone[0].differences
    assert grows == sorted(grows)
    assert 0 < grows[0] < grows[-1]
    assert not any(result.agree for result in alone)
    together = run(n, strategy="single", average=True, differences=True)
    assert together[0].differences == [0.0] * STEPS
    assert all(result.agree for result in together)
    assert_same(together[0], reference(CONFIG))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ddp_holds_and_sends_what_the_formulas_say(n):
    for config in (CONFIG, TIED):
        states = theory.adamw_states(config)
        for result in run(n, strategy="ddp", config=config, record_step=2, bucket_mb=0.02):
            expected = theory.memory("ddp", states, n)
            assert Sizes(result.held.parameters, result.held.gradients, result.held.optimizer) == Sizes(
                expected.parameters, expected.gradients, expected.optimizer
            )
            exchanges = [event for event in result.recording.events if event.kind == "collective"]
            assert {event.name for event in exchanges} == {"all_reduce"}
            assert len(exchanges) > 2
            assert sum(event.sent_bytes for event in exchanges) == theory.volume("ddp", states, n)


def test_a_recorded_step_says_its_peak_and_the_run_is_the_same(reference):
    result = run(2, strategy="ddp", seed_by_rank=True, record_step=3, allocations=True)[0]
    assert result.recording.peak > 0
    assert {"forward", "backward", "optimizer", "collective"} <= {event.kind for event in result.recording.events}
    assert_same(result, reference(CONFIG))
    assert run(2, strategy="ddp")[0].recording is None


def test_several_steps_are_recorded_and_each_step_may_have_its_link():
    settings = {"config": CONFIG, "steps": 3, "batch": 2}
    result = train("single", record_step=(0, 2), link=[None, Link(1.0), None], **settings)
    first, last = result.recordings
    assert first.began < last.began and result.recording is last
    for changed, message in (
        ({"record_step": [0, 3]}, "record_step is [0, 3]: it must be from 0 to 2"),
        ({"link": [None, None]}, "link has 2 links: it must be one for each of 3 steps"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            train("single", **settings, **changed)


def test_D11_the_loss_is_the_mean_over_the_ranks():
    results = run(3, strategy="ddp")
    for step in range(STEPS):
        local = [result.local_losses[step] for result in results]
        assert max(local) - min(local) > 1e-3
        for result in results:
            assert result.losses[step] == pytest.approx(sum(local) / 3, rel=1e-12)


def test_L25_one_rank_is_the_unsharded_model_and_exchanges_nothing(reference):
    result = run(1, strategy="ddp")[0]
    assert result.held == reference(CONFIG).held
    assert theory.volume("ddp", theory.adamw_states(CONFIG), 1) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "zero9"}, "strategy is 'zero9': it must be one of single, ddp"),
        ({"batch": 7}, "batch is 7: it must divide by ranks x accumulation = 2 x 1 = 2; nearest: 6 or 8"),
        ({"batch": 8, "accumulation": 3}, "batch is 8: it must divide by ranks x accumulation = 2 x 3 = 6"),
        ({"accumulation": 0}, "accumulation is 0: it must be a whole number of at least 1"),
        ({"steps": 0}, "steps is 0"),
        ({"record_step": 4}, "record_step is 4: it must be from 0 to 3, or None"),
        ({"strategy": "single", "bucket_mb": 1.0}, "bucket_mb: strategy 'single' has no such setting"),
        ({"bucket_mb": 0.0}, "bucket_mb is 0.0: it must be above 0"),
        ({"strategy": "single", "seed_by_rank": True}, "the ranks start from different weights, "),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(arguments, message):
    with pytest.raises(LaunchError, match="ValueError") as caught:
        run(2, **arguments)
    assert message in str(caught.value)


def test_the_comparison_is_measured_beside_formula():
    rows = compare(("single", "ddp"), (1, 2), CONFIG, steps=4, batch=8)
    assert [(row.strategy, row.world_size) for row in rows] == [("single", 1), ("ddp", 1), ("ddp", 2)]
    for row in rows:
        assert row.held_error == row.sent_error == 0.0
        assert row.loss_error <= TOLERANCE
        assert row.agree
        assert row.seconds > 0
    assert rows[2].sent == theory.adamw_states(CONFIG).gradients
    text = table(rows).splitlines()
    assert [line.split()[:2] for line in text[2:5]] == [["single", "1"], ["ddp", "1"], ["ddp", "2"]]


def test_the_command_prints_the_table_and_refuses_what_does_not_fit(capsys):
    main(["--strategies", "ddp", "--world-sizes", "2", "--layers", "1", "--width", "16", "--steps", "3"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split()[:2] == ["ddp", "2"]
    key = {line.partition("  ")[0] for line in printed[4:]}
    assert {"P, G, O", "error", "peak", "vs 1 process", "agree", "step"} <= key, "every column is explained"
    with pytest.raises(SystemExit):
        main(["--world-sizes", "3"])
    refused = capsys.readouterr()
    assert "batch is 8: it must divide by ranks x accumulation = 3 x 1" in refused.err
    assert refused.out == ""


def test_rows_come_as_they_are_measured(monkeypatch):
    came = []

    def launched(function, **settings):
        came.append((*settings["strategies"], settings["world_size"]))
        return launch(function, **settings)

    monkeypatch.setattr("d2l_utils.launch", launched)
    rows = compare(("ddp", "zero1"), (1,), CONFIG, steps=3, batch=2, each=lambda row: came.append(row.strategy))
    assert came == [("single", 1), ("ddp", 1), "ddp", ("zero1", 1), "zero1"]
    assert [row.strategy for row in rows] == ["ddp", "zero1"]


def test_the_peak_of_the_comparison_is_the_least_of_three_steps_that_are_apart():
    settings = {"config": CONFIG, "steps": 3, "batch": 4}
    for rank in launch(measure, world_size=2, output="quiet", strategies=["fsdp1", "fsdp2"], **settings).results:
        for result, _ in rank.values():
            peaks = [recording.peak for recording in result.recordings]
            at_start = result.held.parameters + result.held.optimizer
            assert len(peaks) == 3 and len(result.losses) == 9
            assert result.peak == at_start + min(peaks)


def test_it_runs_without_a_process_group():
    result = train("single", CONFIG, steps=2, batch=4)
    assert (result.rank, result.world_size, result.agree, result.changed) == (0, 1, True, True)
    assert result.losses == result.local_losses


def still(strategies):
    """Whether each strategy says that training changed the weights, when the learning rate lets nothing change."""
    return {
        name: train(name, TransformerConfig(layers=1, width=16, heads=2, length=8), steps=2, batch=4, lr=0.0).changed
        for name in strategies
    }


def test_a_training_that_changes_nothing_says_so():
    names = ("ddp", "zero1", "zero3", "zero_redundancy", "fsdp1", "fsdp2")
    for found in launch(still, world_size=2, output="quiet", strategies=names).results:
        assert found == dict.fromkeys(names, False)
