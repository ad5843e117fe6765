"""The cost model's shape on real ranks: steps behind a throttled link, where the link decides.

The model knows sizes, the registry's facts and the link; of the machine only how long a step is behind a free link.
"""

import pytest

from chapter19_9.choosing import flops
from chapter19_9.choosing.cost import FP32
from chapter19_9.choosing.presets import of_toy
from chapter19_9.choosing.schedule import schedule
from d2l_utils import launch
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig
from tests.ranks.scaling_functions import both

SMALL = TransformerConfig(layers=2, width=32, heads=2, length=16)
NAMES = ("ddp", "zero3", "fsdp2")
SLOW, SLOWER = Link(bandwidth=2e6, latency=1e-4), Link(bandwidth=4e5, latency=1e-4)
TOLERANCE = 0.25  # a busy machine's 30 ms beside steps of 0.1 to 0.7 s


@pytest.fixture(scope="module")
def measured():
    settings = {"links": [SLOW, SLOWER], "config": SMALL, "steps": 5, "batch": 4, "world_size": 2}
    return launch(both, names=NAMES, output="quiet", **settings).results[0]


def plan_of(name, computing):
    model = of_toy(SMALL)
    return schedule(name, model, 2, FP32, flops.count(model, 2 * SMALL.length, SMALL.length), computing)


def test_the_link_is_charged_what_the_model_says(measured):
    for name, (_, *slowed) in measured.items():
        for run in slowed:
            assert plan_of(name, 1.0).charged(run.link) == pytest.approx(run.charged)


def test_step_times_between_bandwidths_have_the_models_ratio(measured):
    """FSDP2's is left out: what it does on a CPU beside computing, 30 to 60 ms, is as long as the shorter step's bytes."""
    for name in ("ddp", "zero3"):
        free, slow, slower = measured[name]
        plan = plan_of(name, free.step_seconds)
        predicted = plan.seconds(SLOWER) / plan.seconds(SLOW)
        assert predicted > 2.5, "the link decides"
        assert slower.step_seconds / slow.step_seconds == pytest.approx(predicted, rel=TOLERANCE), name


def test_strategies_behind_one_link_have_the_models_ratio(measured):
    plans = {name: plan_of(name, runs[0].step_seconds) for name, runs in measured.items()}
    for name in ("zero3", "fsdp2"):
        predicted = plans[name].seconds(SLOWER) / plans["ddp"].seconds(SLOWER)
        assert predicted > 1.3, "three halves of the bytes"
        seen = measured[name][2].step_seconds / measured["ddp"][2].step_seconds
        assert seen == pytest.approx(predicted, rel=TOLERANCE), name
