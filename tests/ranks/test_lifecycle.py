"""Frames of real steps: every state that is shown has an event or a sample behind it, and each strategy shows what it is.

``unsupported`` is the oracle. It reads recordings as they are and shares no code with what makes the frames.
"""

from dataclasses import replace
from functools import cache

import pytest

from chapter19_9.lifecycle import Broken, frames, lifecycle
from chapter19_9.strategies import STRATEGIES
from chapter19_9.train import train
from d2l_utils import launch
from d2l_utils.events import on_one_clock
from d2l_utils.transformer import TransformerConfig
from tests.ranks import lifecycle_functions as ranks

ODD = TransformerConfig(layers=3, width=18, heads=3, length=13, tied=True, frozen=True)
NAMES = [name for name in STRATEGIES if name != "single"]
PARTS = ("reduce_scatter", "send", "recv")
BLOCKS = [f"blocks.{i}" for i in range(ranks.CONFIG.layers)]


@cache
def launched(n, config):
    """Every strategy in one launch."""
    names = [*NAMES, "zero3+"] if config is ranks.CONFIG else NAMES
    return launch(ranks.recorded_steps, world_size=n, output="quiet", timeout=120, names=names, config=config).results


def recorded(name, n, config=ranks.CONFIG):
    return [result[name] for result in launched(n, config)]


@cache
def film(name, n, config=ranks.CONFIG):
    return frames(recorded(name, n, config))


class Raw:
    """One rank's recording on the common clock, unprepared."""

    def __init__(self, one, events, began):
        shift = (one.recording.began - began) * 1e-9
        self.events, self.whole = events, one.whole
        self.samples = [replace(h, time=h.time + shift) for h in one.recording.holdings]

    def of(self, block):
        return [sample for sample in self.samples if sample.block == block]

    def collectives(self, block, of):
        own = [e for e in self.events if e.kind == "collective" and e.of == of and e.group_size > 1]
        return [e for e in own if block in {b if b in self.whole else "" for b in e.blocks}]

    def supports(self, block, cell, time):
        """None where all of a cell's states follow from what was recorded, else the one that does not."""
        samples = [sample for sample in self.of(block) if sample.time <= time]
        later = [sample for sample in self.of(block) if sample.time > time]
        now = samples[-1]
        if cell.bytes != (now.parameters, now.gradients, now.optimizer):
            return "bytes"
        whole = self.whole[block]
        was_whole = any(sample.parameters >= whole[0] for sample in samples)
        gathers = self.collectives(block, "parameters")
        active = [e for e in gathers if e.start <= time < e.end]
        if row := [e for e in gathers if e.name == "broadcast"]:  # a block's parts come one by one
            active = row if min(e.start for e in row) <= time < max(e.end for e in row) else []
        # since the last time that the block was not whole (or whole, if it is not now)
        turn = [s.time for s in samples if (s.parameters >= whole[0]) != (now.parameters >= whole[0])]
        done = [e for e in gathers if (turn[-1] if turn else 0) <= e.end <= time]
        room = now.parameters >= whole[0] and bool(turn) and not done
        arriving = now.parameters < whole[0] and bool(done)
        right = {
            "full": now.parameters >= whole[0] and not (active or room),
            "gathering": bool(active or room or arriving),
            "shard": now.parameters < whole[0] and not (was_whole or active or arriving),
            "freed": now.parameters < whole[0] and was_whole and not (active or arriving),
        }
        if not right[cell.parameters]:
            return "parameters"
        used = [s for s in samples if s.at == "backward"]
        reductions = self.collectives(block, "gradients")
        over = [e for e in reductions if e.end <= time]
        right = {
            "none": not (now.gradients or used) or not whole[1],
            "kept": now.gradients > 0 and not used,
            "computing": bool(used) and not over,
            "full": bool(used) and now.gradients >= whole[1] and not over,
            "reducing": any(e.start <= time for e in reductions)
            and (any(e.end > time for e in reductions) or not now.gradients or not later),
            "mean": now.gradients >= whole[1] and any(e.name == "all_reduce" for e in over),
            "shard": 0 < now.gradients < whole[1] and any(e.name in PARTS for e in over),
            "shard_kept": now.gradients >= whole[1] and any(e.name in PARTS for e in over),
        }
        if not right[cell.gradients]:
            return "gradients"
        state = "none" if not now.optimizer else "full" if now.optimizer >= whole[2] else "shard"
        return None if cell.optimizer == state else "optimizer"


def unsupported(film, recorded):
    clock = on_one_clock([one.recording for one in recorded])
    began = min(one.recording.began for one in recorded)
    raw = [Raw(one, clock[rank], began) for rank, one in enumerate(recorded)]
    found = []
    for number, frame in enumerate(film.frames):
        for rank, row in enumerate(frame.cells):
            for block, cell in zip(film.blocks, row, strict=True):
                if wrong := raw[rank].supports(block, cell, frame.times[rank]):
                    found.append((number, rank, block, wrong, getattr(cell, wrong)))
        for flight, who in frame.flights:
            for rank in who:
                names = ("send", "recv") if flight.name == "sends" else (flight.name,)
                events = [e for e in raw[rank].events if e.kind == "collective" and e.name in names]
                if not any(e.start <= frame.times[rank] for e in events):
                    found.append((number, rank, flight, "flight"))
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", [*NAMES, "zero3+"])
def test_every_state_that_a_frame_shows_was_recorded(name, n):
    shown = film(name, n)
    assert unsupported(shown, recorded(name, n)) == []
    assert shown.frames[0].words.endswith("the step begins")
    assert shown.frames[-1].words.endswith("the step ends")
    for one, other in zip(shown.frames, shown.frames[1:], strict=False):
        assert all(before <= after for before, after in zip(one.times, other.times, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_tied_frozen_and_uneven_at_three_ranks(name):
    assert unsupported(film(name, 3, ODD), recorded(name, 3, ODD)) == []


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "fsdp2"])
def test_a_frame_that_shows_what_was_not_recorded_is_found(name):
    """Every state of a kind in place of the right one, in the middle of each phase."""
    shown, others = (
        film(name, 2),
        {"parameters": "shard freed full", "gradients": "none shard mean", "optimizer": "none shard full"},
    )
    tried = 0
    for number in range(1, len(shown.frames), 5):
        for kind, states in others.items():
            for state in states.split():
                frame = shown.frames[number]
                row = list(frame.cells[1])
                if getattr(row[2], kind) == state:
                    continue
                row[2] = replace(row[2], **{kind: state})
                wrong = replace(frame, cells=(frame.cells[0], tuple(row)))
                changed = replace(shown, frames=(*shown.frames[:number], wrong, *shown.frames[number + 1 :]))
                assert [item[:4] for item in unsupported(changed, recorded(name, 2))] == [(number, 1, "blocks.1", kind)]
                tried += 1
    assert tried > 15


def changed(name, n=2, events=None, holdings=None):
    """The recordings with rank 1's changed."""
    ones = recorded(name, n)
    recording = replace(ones[1].recording)
    if events is not None:
        recording.events = [e for e in map(events, recording.events) if e is not None]
    if holdings is not None:
        recording.holdings = [h for h in map(holdings, recording.holdings) if h is not None]
    ones[1] = replace(ones[1], recording=recording)
    return ones


def serves(event, of):
    return event.kind == "collective" and event.of == of and "blocks.1" in event.blocks


@pytest.mark.parametrize("name", ["zero3", "zero3+", "fsdp1", "fsdp2", "fsdp2_no_reshard"])
def test_recordings_that_break_a_rule_are_refused(name):
    with pytest.raises(Broken, match=r"rank 1, .* become whole, but no collective filled them \(blocks.1\)"):
        frames(changed(name, events=lambda e: None if serves(e, "parameters") else e))
    with pytest.raises(Broken, match=r"rank 1, .* forward uses parameters that are gathering \(blocks.1\)"):
        frames(changed(name, events=lambda e: replace(e, end=e.end + 1) if serves(e, "parameters") else e))
    whole = recorded(name, 2)[0].whole["blocks.1"][0]
    low = lambda h: replace(h, parameters=min(h.parameters, whole - 1)) if h.block == "blocks.1" else h  # noqa: E731
    with pytest.raises(Broken, match=r"rank 1, .* forward uses parameters that are (shard|gathering) \(blocks.1\)"):
        frames(changed(name, holdings=low))
    last = [h for h in recorded(name, 2)[1].recording.holdings if h.block == "blocks.1" and h.parameters < whole][-1]
    with pytest.raises(Broken, match=r"rank 1, .* freed twice"):
        frames(changed(name, holdings=lambda h: replace(h, parameters=h.parameters - 4) if h is last else h))
    with pytest.raises(Broken, match=r"rank 1, .* that no collective reduced \(blocks.1\)"):
        frames(changed(name, events=lambda e: None if serves(e, "gradients") else e))
    with pytest.raises(Broken, match=r"rank 1, .* optimizer steps while gradients are being reduced"):
        frames(changed(name, events=lambda e: replace(e, end=e.end + 1) if serves(e, "gradients") else e))


def test_recordings_that_are_not_one_step_are_refused():
    whole = recorded("ddp", 2)
    with pytest.raises(ValueError, match=r"recorded has ranks \[1\]"):
        frames(whole[1:])
    with pytest.raises(ValueError, match=r"ranks \[1\] have no holdings"):
        frames(changed("ddp", holdings=lambda h: None))


# What each strategy is, seen in its frames


def states(name, n, kind, block="blocks.1", rank=1):
    """The states that one cell goes through, without repetition."""
    shown = film(name, n)
    seen = [getattr(frame.cells[rank][shown.blocks.index(block)], kind) for frame in shown.frames]
    return [state for before, state in zip([None, *seen], seen, strict=False) if state != before]


def at_once(name, n, kind, which):
    """In how many blocks at once a rank is in one of these states, at most."""
    shown = film(name, n)
    return max(
        sum(getattr(cell, kind) in which for cell in row[1:]) for frame in shown.frames for row in frame.cells
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
def test_parameters(n):
    twice = ["shard", "gathering", "full", "freed", "gathering", "full", "freed"]
    for name in ("zero3", "zero3+", "fsdp1", "fsdp2"):
        assert states(name, n, "parameters") == twice, name
    for name in ("fsdp1_grad_op", "fsdp2_no_reshard"):
        assert states(name, n, "parameters") == twice[:4], name
    assert states("ddp", n, "parameters") == ["full"]
    for name in ("zero1", "zero2", "zero_redundancy"):
        assert states(name, n, "parameters") == ["full", "gathering", "full"], name
    there = ("gathering", "full")
    assert at_once("zero3", n, "parameters", there) == 1
    assert at_once("zero3+", n, "parameters", there) == 2
    assert at_once("fsdp2", n, "parameters", ["full"]) <= 2
    assert at_once("fsdp2_no_reshard", n, "parameters", ["full"]) == len(BLOCKS)


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_and_optimizer(n):
    for name in ("ddp", "zero_redundancy"):
        assert states(name, n, "gradients")[-2:] == ["reducing", "mean"]
    assert states("zero1", n, "gradients") == ["kept", "computing", "full", "reducing", "shard_kept"]
    for name in ("zero2", "zero3", "fsdp1", "fsdp2", "fsdp2_no_reshard"):
        assert states(name, n, "gradients")[-2:] == ["reducing", "shard"], name
    assert at_once("zero1", n, "gradients", ["full"]) == len(BLOCKS)
    assert at_once("zero2", n, "gradients", ["full", "mean"]) <= 1
    assert states("ddp", n, "optimizer") == ["full"]
    for name in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
        assert states(name, n, "optimizer") == ["shard"], name


def test_one_rank_has_no_network():
    for name in NAMES:
        assert all(not frame.flights for frame in film(name, 1).frames), name


def test_parts_of_all_ranks_make_one_whole():
    for name in ("zero1", "zero2", "zero3", "fsdp2"):
        shown = film(name, 4)
        for column, block in enumerate(shown.blocks):
            parts = [row[column].bytes[2] for row in shown.frames[0].cells]
            # AdamW counts steps in 4 bytes a tensor; a unit is padded to a multiple of its ranks
            assert shown.whole[block][2] <= sum(parts) <= 1.02 * shown.whole[block][2] + 600, (name, block)


def test_memory_is_that_of_the_recording():
    shown, ones = film("fsdp2", 2), recorded("fsdp2", 2)
    for rank, one in enumerate(ones):
        assert max(point[1] for point in shown.curves[rank]) == one.start + one.recording.peak
        assert shown.frames[0].held[rank] == one.start


def test_recording_holdings_changes_no_bit_and_leaves_no_hook():
    names = ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"]
    for result in launch(ranks.same_numbers, world_size=2, output="quiet", timeout=90, names=names).results:
        assert result == dict.fromkeys(names, (0.0, 0))


def test_from_a_name_to_frames():
    shown = lifecycle("fsdp2", ranks.CONFIG, world_size=2)
    assert shown.title == "FSDP2, reshard after forward, 2 ranks"
    assert shown.blocks == ("", *BLOCKS)
    assert shown.rest == ("tokens", "positions", "norm", "head")
    with pytest.raises(ValueError, match="lifecycle_step is 2: a lifecycle is of fp32, not checkpointed"):
        train("zero1", steps=3, lifecycle_step=2, options={"dtype": "bfloat16"})
