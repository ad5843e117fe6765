"""The pretended link: what it charges, that it queues, that it holds nobody up who does not wait; for every strategy."""

import pytest

from chapter19_9 import theory
from chapter19_9.strategies import STRATEGIES
from d2l_utils import launch
from d2l_utils.launching.errors import LaunchError
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig
from tests.ranks import throttle_functions as ranks

SMALL = TransformerConfig(layers=2, width=32, heads=2, length=16)
LINK = Link(bandwidth=4e6, latency=2e-4)
SLOW = Link(bandwidth=10e3, latency=0.05)  # 4000 B: 0.4 s and two hops


@pytest.fixture(scope="module")
def alone():
    return launch(ranks.by_itself, world_size=2, output="quiet", link=SLOW).results


@pytest.fixture(scope="module")
def trained():
    return launch(ranks.trained, world_size=2, output="quiet", config=SMALL, link=LINK, steps=3, batch=4).results


def test_a_collective_has_the_link_for_its_bytes_and_hops(alone):
    for rank in alone:
        names = [(t["name"], t["bytes"], t["group_size"]) for t in rank["transfers"]]
        assert names[:2] == [("all_reduce", 4000, 2), ("broadcast", 2000, 2)]
        assert sorted(names[2:]) == [("recv", 16, 2), ("send", 16, 2)]
        took = {t["name"]: t["ends"] - t["begins"] for t in rank["transfers"]}
        wanted = {"all_reduce": 0.4 + 0.1, "broadcast": 0.1 + 0.05, "send": 0.0016 + 0.05, "recv": 0.0}
        assert took == pytest.approx(wanted, abs=1e-6)
        assert rank["charged"] == pytest.approx(sum(wanted.values()), abs=1e-6)
        assert rank["outside"] == 0


def test_the_link_carries_one_thing_at_a_time_and_the_asker_goes_on(alone):
    for rank in alone:
        first, second = rank["transfers"][:2]
        assert second["begins"] == pytest.approx(first["ends"], abs=1e-6)
        assert rank["free"] < first["ends"] and rank["untouched"] in (1.0, 2.0) and rank["done"] == [False, False]
        assert all(t["asked"] <= t["begins"] <= t["ends"] <= t["done"] for t in rank["transfers"])
        assert rank["values"] == [3.0, 2.0, [0.0, 2.0, 4.0, 6.0] if rank is alone[0] else [8.0, 10.0, 12.0, 14.0]]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_it_slows_every_strategy_and_changes_none(trained, name):
    sent = 0.0
    for rank in trained:
        slowed, free = rank[name]
        assert slowed.losses == free.losses and slowed.agree
        events = [e for e in slowed.recording.events if e.kind == "collective"]
        others = [e for e in free.recording.events if e.kind == "collective"]
        assert sorted((e.name, e.bytes) for e in events) == sorted((e.name, e.bytes) for e in others)
        assert all(e.backend_start >= e.start + LINK.seconds(e.name, e.bytes, 2) - 1e-4 for e in events)
        assert slowed.seconds[2] >= sum(LINK.seconds(e.name, e.bytes, 2) for e in events) - 1e-3
        sent += sum(e.sent_bytes for e in events) / 2
    assert sent == pytest.approx(theory.exact_volume(name, theory.shapes(SMALL), 2))


def test_what_the_backend_refuses_reaches_who_waits():
    for said, value, restored in launch(ranks.mistaken, world_size=2, output="quiet", link=LINK).results:
        assert len(said) == 3 and said[0] == said[1] and "BAND" in said[0].upper()
        assert said[2].startswith("a throttle is already in force")
        assert value == 2.0 and restored


def test_an_error_does_not_wait_for_the_link():
    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: mine") as caught:
        launch(ranks.failing, world_size=2, timeout=30, link=Link(10.0))
    assert "left with an error" in str(caught.value)
