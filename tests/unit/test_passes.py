"""Gradients held by pass from a recording made by hand, and several trainings in a row without a process group."""

import pytest

from chapter19_9.lifecycle import frames
from chapter19_9.passes import gradients_by_pass, passes
from chapter19_9.recorded import Recorded
from chapter19_9.several import train_each
from d2l_utils.events import Event, Holding, Recording
from d2l_utils.transformer import TransformerConfig


def recorded(*held: tuple[float, str, int]) -> Recorded:
    """Two passes, of 4 and of 2 seconds, then the optimizer."""
    names = [("forward", "tokens", 1), ("forward", "head", 2), ("backward", "head", 3), ("forward", "tokens", 5)]
    events = [Event(kind, name, 0, at, at + 0.5) for kind, name, at in [*names, ("optimizer", "AdamW", 7)]]
    holdings = [Holding(time, block, 100, gradients, 200) for time, block, gradients in held]
    return Recorded("ddp", Recording(rank=0, world_size=1, events=events, holdings=holdings), {"": (100, 100, 200)}, 0)


def test_gradients_of_all_blocks_by_share_of_the_pass():
    one = recorded((0, "", 0), (0, "a", 0), (2, "a", 8), (4, "", 5), (6, "a", 3), (7.5, "", 0))
    assert passes(one) == [1, 5]
    assert gradients_by_pass(one) == {0.0: 0, 0.25: 8, 0.75: 13, 1.5: 8, 2.0: 8}


def test_what_was_there_before_counts_from_the_start():
    assert gradients_by_pass(recorded((0, "", 4), (6, "a", 3))) == {0.0: 4, 1.5: 7, 2.0: 7}


def test_frames_are_of_one_pass():
    with pytest.raises(ValueError, match=r"^recorded is a step of 2 passes: frames"):
        frames([recorded((0, "", 4))])


def test_several_trainings_are_those_of_train_one_by_one():
    small = TransformerConfig(layers=1, width=8, heads=2, length=4)
    found = train_each({"single": {}, "more": {"strategy": "single", "batch": 4}}, config=small, steps=1, batch=2)
    assert {label: result.strategy for label, result in found.items()} == {"single": "single", "more": "single"}
    assert found["single"].losses != found["more"].losses
