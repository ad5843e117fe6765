"""DeepSpeed's stages through the one loop: the mathematics of one process, and what they hold and send, to the byte.

They need the extra "deepspeed". Where it is not installed the tests are skipped and say so; under .ci/run they fail.
"""

import os

import pytest

from chapter19_9 import theory
from chapter19_9.strategies import OPTIONAL, get
from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig
from tests.ranks import deepspeed_functions as ranks
from tests.ranks.test_strategies import ODD, differs, reference

INSTALLED = all(strategy.installed for strategy in OPTIONAL.values())
MESSAGE = "DeepSpeed is not installed: python -m pip install --no-build-isolation -e '.[deepspeed]'"
if not INSTALLED and not os.environ.get("D2L_CI"):
    pytest.skip(MESSAGE, allow_module_level=True)

STAGES = list(OPTIONAL)
COMMON = {"config": ODD, "steps": 4, "batch": 24, "record_step": 3}  # stage 3 settles in its third step
PEAK = {"config": TransformerConfig(layers=4, width=64, heads=2, length=8), "batch": 2, "allocations": True}
WAYS = {
    "plain": {},
    "clipped": {"clip": 0.25},
    "accumulated": {"accumulation": 3},
    "checkpointed": {"checkpointing": True},
    "unequal": {"samples": [10, 14]},
    "owners": {"options": {"owners": True}},
    "small buckets": {"bucket_mb": 0.03, **PEAK},
}


@pytest.fixture(scope="module")
def runs():
    """By number of ranks, a launch with every stage."""
    if not INSTALLED:
        pytest.fail(MESSAGE)
    ways = {n: WAYS if n == 2 else {"plain": {}} for n in (1, 2, 3)}
    return {
        n: launch(ranks.trained, world_size=n, output="quiet", timeout=200, ways=ways[n], common=COMMON) for n in ways
    }


def expected(**settings):
    return reference(ODD, steps=COMMON["steps"], batch=COMMON["batch"], **settings)


def sent(found):
    return sum(e.sent_bytes for r in found for e in r.recording.events if e.kind == "collective") / len(found)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_one_process_on_the_whole_batch(runs, stage, n):
    for rank, found in enumerate(runs[n].results):
        result = found[stage, "plain"]
        assert (result.strategy, result.rank, result.world_size) == (stage, rank, n)
        assert differs(result, expected()) == []
        assert "positions.weight" in result.weights
        assert "positions.weight" not in result.gradients  # frozen


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_so_in_other_ways_of_training(runs, stage):
    for found in runs[2].results:
        for way in ("accumulated", "checkpointed", "unequal"):
            assert differs(found[stage, way], expected()) == [], way
        assert differs(found[stage, "clipped"], expected(clip=0.25)) == []
        if stage in ("deepspeed1", "deepspeed2"):
            assert differs(found[stage, "owners"], expected()) == []


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_it_holds_and_sends_what_the_formulas_say(runs, stage, n):
    shapes = theory.shapes(ODD)
    for way, passes in (("plain", 1), ("accumulated", 3)) if n == 2 else (("plain", 1),):
        results = [found[stage, way] for found in runs[n].results]
        held = [(r.held.parameters, r.held.gradients, r.held.optimizer) for r in results]
        assert held == [(e.parameters, e.gradients, e.optimizer) for e in theory.exact_memory(stage, shapes, n)]
        assert sent(results) == pytest.approx(theory.exact_volume(stage, shapes, n, passes), abs=1e-3)
        names = {e.name for r in results for e in r.recording.events if e.kind == "collective" and e.sent_bytes}
        assert names <= {exchange.collective for exchange in get(stage).communicates} | {"all_reduce"}


@pytest.mark.parametrize("stage", ["deepspeed1", "deepspeed2"])
def test_reduced_to_owners_it_sends_what_the_paper_says(runs, stage):
    """By default half as much again: one all-reduce for all owners."""
    gradients = theory.adamw_states(ODD).gradients
    ways = {way: sent([found[stage, way] for found in runs[2].results]) for way in ("owners", "plain")}
    assert ways == {"owners": gradients, "plain": gradients * 3 / 2}


def test_stage_1_has_whole_gradients_in_backward_and_stage_2_never(runs):
    """In the optimizer step both hold the same, at rest too."""
    whole, highest = theory.adamw_states(PEAK["config"]).gradients, []
    for stage in ("deepspeed1", "deepspeed2"):
        recording = runs[2].results[0][stage, "small buckets"].recording
        step = next(event.start for event in recording.events if event.kind == "optimizer")
        highest.append(max(point.bytes for point in recording.memory if point.time < step))
    assert highest[0] > whole > highest[1]


def test_nothing_is_printed_changed_or_left(runs):
    for n, run in runs.items():
        assert run.output == [""] * n
        assert run.late_failures == {}
        assert [(found["left"], found["changed"]) for found in run.results] == [([], set())] * n


def test_what_a_stage_does_not_have_is_refused(runs):
    for found in runs[2].results:
        assert found["deepspeed0", "owners"] == "owners: strategy 'deepspeed0' has no such setting"
        assert found["deepspeed0", "small buckets"] == "bucket_mb: strategy 'deepspeed0' has no such setting"
