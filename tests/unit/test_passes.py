"""Memory by pass from a recording made by hand, and several trainings in a row without a process group."""

from types import SimpleNamespace

from chapter19_9.passes import least_by_pass
from chapter19_9.several import train_each
from d2l_utils.events import Event, MemoryPoint, Recording
from d2l_utils.transformer import TransformerConfig


def recorded(*points: tuple[float, int]) -> SimpleNamespace:
    """Two passes, of 4 and of 2 seconds, then the optimizer."""
    names = [("forward", "tokens", 0), ("forward", "head", 1), ("backward", "head", 2), ("forward", "tokens", 4)]
    events = [Event(kind, name, 0, at, at + 0.5) for kind, name, at in [*names, ("optimizer", "AdamW", 6)]]
    return SimpleNamespace(recording=Recording(events=events, memory=[MemoryPoint(*point) for point in points]))


def test_the_least_of_each_part_of_each_pass_and_of_all_recordings():
    one = recorded((0, 0), (0.5, 7), (1.5, 3), (2.5, 9), (4.5, 5), (5.5, 6), (6.5, 1))
    assert least_by_pass([one], parts=2) == {0.0: 0, 0.5: 3, 1.0: 5, 1.5: 5}
    other = recorded((0, 2), (2, 1), (4, 8))
    assert least_by_pass([one, other], parts=2) == {0.0: 0, 0.5: 1, 1.0: 5, 1.5: 5}


def test_several_trainings_are_those_of_train_one_by_one():
    small = TransformerConfig(layers=1, width=8, heads=2, length=4)
    found = train_each({"single": {}, "more": {"strategy": "single", "batch": 4}}, config=small, steps=1, batch=2)
    assert {label: result.strategy for label, result in found.items()} == {"single": "single", "more": "single"}
    assert found["single"].losses != found["more"].losses
