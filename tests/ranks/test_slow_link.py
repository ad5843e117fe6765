"""The table and the slow link on real ranks: exact cells, and step times that the link alone explains."""

from dataclasses import replace

import pytest

from chapter19_9.compare import compare
from chapter19_9.one_picture import text
from chapter19_9.slow_link import FREE, plan, trained
from chapter19_9.strategies import STRATEGIES
from d2l_utils import launch
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig
from tests.ranks import slow_link_functions as ranks
from tests.ranks.tries import holds

# nothing divides by 3; one weight in two places; one that is not trained
ODD = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
SMALL = TransformerConfig(layers=2, width=32, heads=2, length=16)
SLOW = Link(bandwidth=1e6, latency=1e-4)


@pytest.fixture(scope="module")
def rows():
    return compare(world_sizes=(3,), config=ODD, steps=3, batch=6)


@pytest.fixture(scope="module")
def slowed():
    links = [FREE, SLOW]
    settings = {"config": SMALL, "rounds": 1, "sessions": 1, "batch": 4, "world_size": 2, "output": "quiet"}
    ways = {name: {"strategy": name} for name in ("ddp", "zero3")}
    results = launch(trained, ways=ways, links=links, **settings).results
    return {name: [result[name] for result in results] for name in ways}


def test_every_state_and_every_logical_byte_is_the_formulas(rows):
    assert [row.strategy for row in rows] == list(STRATEGIES)
    for row in rows:
        assert row.held_error == row.between_error == row.sent_error == 0, row
        assert row.counts == row.counts_formula, row
        assert row.peak >= row.at_peak.total >= row.held.parameters, row
    assert text(rows).count(" = ") + text(rows).count(" =\n") + text(rows).endswith("=") == 7 * len(rows)


def test_the_wire_carries_what_gloos_algorithms_say_and_not_the_logical_bytes(rows):
    by_name = {row.strategy: row for row in rows}
    for row in rows:
        if row.wire is not None and row.sent:
            headers = 10_000  # 48 bytes a message
            assert row.on_gloo <= row.wire <= row.on_gloo + headers, row
    assert by_name["ddp"].on_gloo == by_name["ddp"].sent
    for name in ("zero1", "zero3", "fsdp1", "fsdp2"):
        assert by_name[name].on_gloo > 1.25 * by_name[name].sent


def test_a_slow_step_is_as_long_as_its_plan_says_or_longer(slowed):
    """Not shorter than what the link alone takes: a busy machine only adds to it."""
    for both in slowed.values():
        for free, slow in both:
            assert free.charged == 0
            made = plan(free)
            assert made.seconds(FREE) == pytest.approx(free.step_seconds)
            assert made.charged(SLOW) == pytest.approx(slow.charged)
            assert made.seconds(SLOW) >= slow.charged
            assert slow.step_seconds >= 0.999 * slow.charged
    sent = {name: both[0][1].charged for name, both in slowed.items()}
    assert sent["zero3"] > 1.4 * sent["ddp"]


@pytest.mark.parametrize(
    "way",
    [{"strategy": "ddp", "bucket_mb": 0.04}, {"strategy": "zero3", "options": {"prefetch": True}}],
    ids=lambda way: way["strategy"],
)
def test_steps_behind_a_link_are_as_long_as_predicted(way):
    """Over bandwidths from where the link decides to where it hides, for what overlaps with backward and with forward.
    Blocks sleep, so that a busy machine changes little; the lines and marks of 19.9.10 have only this arithmetic."""
    links = [FREE, *(Link(1e6 * bandwidth, latency=1e-4) for bandwidth in (0.5, 2.5))]
    deep = replace(SMALL, layers=4)
    settings = {"config": deep, "batch": 4, "sessions": 1, "world_size": 2, "output": "quiet"}

    def predicted(runs):
        made = plan(runs[0])
        assert [run.step_seconds for run in runs] == pytest.approx([made.seconds(link) for link in links], rel=1 / 7)
        # which "all is waited for" or "all hides" would not be
        assert made.seconds(links[1]) > 1.5 * made.seconds(FREE)
        assert made.seconds(links[2]) < made.seconds(FREE) + 0.9 * made.charged(links[2])

    holds(predicted, lambda _: launch(ranks.asleep, ways={"": way}, links=links, **settings).results[0][""])
