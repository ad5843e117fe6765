"""The cost model's shape on real ranks: steps behind a throttled link, from where the link decides to where it hides.

The model knows sizes, the registry's facts, the link, and how long the blocks compute: they sleep, so that a busy machine
changes little. Nothing is taken from the slow steps.
"""

from functools import cache

import pytest

from chapter19_9.choosing.cost import FP32
from chapter19_9.choosing.flops import Flops
from chapter19_9.choosing.presets import of_toy
from chapter19_9.choosing.schedule import schedule
from chapter19_9.slow_link import FREE
from d2l_utils import launch
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig
from tests.ranks import slow_link_functions as ranks
from tests.ranks.tries import holds

TOY = TransformerConfig(layers=4, width=32, heads=2, length=16)
WAYS = {
    "ddp": {"strategy": "ddp", "bucket_mb": 0.04},
    "zero3": {"strategy": "zero3", "options": {"prefetch": True}},
    "fsdp2": {"strategy": "fsdp2"},
}
SLOW, MIDDLE = (Link(1e6 * bandwidth, latency=1e-4) for bandwidth in (0.5, 1.0))
SLEEP = Flops(ranks.FORWARD, ranks.BACKWARD, 0.0, 0.0, TOY.layers)
COMPUTING = SLEEP.total


@cache
def measured(attempt):
    settings = {"config": TOY, "batch": 4, "rounds": 1, "sessions": 1, "world_size": 2, "output": "quiet"}
    return launch(ranks.asleep, links=[FREE, SLOW, MIDDLE], ways=WAYS, **settings).results[0]


def plan_of(name):
    options = {"bucket_mb": 0.04} if name == "ddp" else {"prefetch": name == "zero3"}
    return schedule(name, of_toy(TOY), 2, FP32, SLEEP, COMPUTING, **options)


def test_the_link_is_busy_as_long_as_the_model_says():
    for name, (_, *slowed) in measured(0).items():
        for run in slowed:
            assert plan_of(name).charged(run.link) == pytest.approx(run.charged), name


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_steps_behind_a_link_are_as_long_as_the_model_says(name):
    """Never shorter; longer by what the machine adds to a step behind a free link too, and by no more than a quarter."""
    plan = plan_of(name)
    assert plan.seconds(SLOW) > 1.4 * plan.seconds(MIDDLE), "the link decides"

    def as_said(runs):
        free, *slowed = runs
        for run in slowed:
            predicted = plan.seconds(run.link)
            assert predicted < 0.9 * (COMPUTING + plan.charged(run.link)), "some of it hides"
            assert 0.98 * predicted < run.step_seconds < 1.25 * predicted + free.step_seconds - COMPUTING

    holds(as_said, lambda attempt: measured(attempt)[name])


def test_fsdp2_on_a_cpu_hides_nothing():
    """Its hiding is that of a device's streams: here a step is its computing and its link, one after the other."""
    plan = plan_of("fsdp2")
    for run in measured(0)["fsdp2"][1:]:
        assert plan.seconds(run.link) < 0.9 * (COMPUTING + plan.charged(run.link)) < run.step_seconds
