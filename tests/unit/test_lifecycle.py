"""Frames from recordings made by hand, what the recorder samples in one process, film strip, player without a browser.

Recordings made by hand show the rules one by one; tests/ranks/test_lifecycle.py has the real ones.
"""

import base64
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from chapter19_9.lifecycle import Broken, frames
from chapter19_9.moments import thinned
from chapter19_9.recorded import Recorded, unsharded
from d2l_utils.events import Event, Holding, MemoryPoint, Recording
from d2l_utils.figure import png
from d2l_utils.filmstrip import check, chosen, filmstrip
from d2l_utils.record import record
from d2l_utils.transformer import Transformer, TransformerConfig
from d2l_utils.widgets import ShardLifecycle
from d2l_utils.widgets.lifecycle import aligned

WHOLE = {"": (40, 40, 80), "blocks.0": (100, 100, 200)}


def gathered(rank, began=0):
    """A step of one of two ranks, times in ms: block 0 is gathered, used, freed, gathered, used, freed, reduced."""

    def send(name, of, start, end):
        return Event("collective", name, rank, start, end, 100, group_size=2, of=of, blocks=("blocks.0",))

    def hold(time, parameters, gradients=0, at=""):
        return Holding(time, "blocks.0", parameters, gradients, 100, at)

    events = [
        send("all_gather", "parameters", 1, 2),
        Event("forward", "blocks.0", rank, 3, 4),
        send("all_gather", "parameters", 6, 7),
        Event("backward", "blocks.0", rank, 8, 9),
        send("reduce_scatter", "gradients", 10, 11),
        Event("optimizer", "AdamW", rank, 12, 13),
    ]
    holdings = [
        Holding(0, "", 40, 0, 80, "start"), hold(0, 50, at="start"), hold(2.5, 150), hold(3, 150, at="forward"),
        hold(4.5, 50), hold(5.9, 150), hold(8, 150, at="backward"), hold(9.5, 50), hold(11.5, 50, 50),
    ]  # fmt: skip
    scale = 1e-3
    recording = Recording(
        rank, 2, 14 * scale, began,
        [replace(event, start=event.start * scale, end=event.end * scale) for event in events],
        [MemoryPoint(0, 0), MemoryPoint(3 * scale, 500), MemoryPoint(9 * scale, 100)],
        500, None, [replace(holding, time=holding.time * scale) for holding in holdings],
    )  # fmt: skip
    return Recorded("fsdp2", recording, WHOLE, 1000)


def test_frames_of_two_ranks_and_their_words():
    film = frames([gathered(1, began=200_000), gathered(0)])
    assert [frame.words for frame in film.frames] == [
        "all ranks: the step begins",
        "all ranks: all-gather of block 0's parameters begins",
        "all ranks: forward of block 0",
        "all ranks: block 0's gathered parameters are freed",
        "all ranks: all-gather of block 0's parameters begins",
        "all ranks: backward of block 0",
        "all ranks: block 0's gathered parameters are freed",
        "all ranks: reduce-scatter of block 0's gradients begins",
        "all ranks: reduce-scatter of block 0's gradients is done",
        "all ranks: the optimizer step begins",
        "all ranks: the optimizer step is done",
        "all ranks: the step ends",
    ]
    cells = [frame.cells[1][1] for frame in film.frames]
    assert [cell.parameters for cell in cells] == [
        "shard", "gathering", "full", "freed", "gathering", "full", *["freed"] * 6,
    ]  # fmt: skip
    assert [cell.gradients for cell in cells] == [
        *["none"] * 5, "computing", "computing", "reducing", *["shard"] * 4,
    ]  # fmt: skip
    assert [cell.busy for cell in cells if cell.busy] == ["forward", "backward", "optimizer"]
    assert {cell.optimizer for cell in cells} == {"shard"}
    assert film.frames[2].times == pytest.approx((3e-3, 3.2e-3)), "each rank at its own moment"
    assert film.frames[2].held == (1500, 1500)
    assert [len(frame.flights) for frame in film.frames] == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    ((flight, ranks),) = film.frames[1].flights
    assert (flight.name, flight.of, flight.blocks, ranks) == ("all_gather", "parameters", ("blocks.0",), (0, 1))


def test_a_rank_that_is_late_is_where_it_was():
    """Rank 1 frees block 0 only after rank 0 has gone on to gather it again."""
    late = gathered(1)
    moved = {4.5: 6.4e-3, 5.9: 6.6e-3}
    holdings = [replace(h, time=moved.get(round(h.time * 1e3, 3), h.time)) for h in late.recording.holdings]
    events = [replace(e, start=6.7e-3) if round(e.start * 1e3, 3) == 6 else e for e in late.recording.events]
    film = frames([gathered(0), replace(late, recording=replace(late.recording, holdings=holdings, events=events))])
    freed, gathering = film.frames[3:5]
    assert (freed.words, freed.ranks) == ("all ranks: block 0's gathered parameters are freed", (0, 1))
    assert freed.times == pytest.approx((4.5e-3, 6.4e-3)), "one event, each rank's own moment"
    assert gathering.times == pytest.approx((6e-3, 6.7e-3))


def only(kind, change):
    """A recording of rank 0 in which one event or holding is changed."""
    one = gathered(0)
    return frames(
        [replace(one, recording=replace(one.recording, **{kind: change(getattr(one.recording, kind))})), gathered(1)]
    )


def test_each_rule_is_checked():
    def without(at):
        return lambda many: [item for i, item in enumerate(many) if i != at]

    def with_(at, **values):
        return lambda many: [replace(item, **values) if i == at else item for i, item in enumerate(many)]

    with pytest.raises(Broken, match="whole, but no collective filled them"):
        only("events", without(0))
    with pytest.raises(Broken, match=r"rank 0, 3\.00 ms: forward uses parameters that are gathering"):
        only("events", with_(0, end=3.5e-3))
    with pytest.raises(Broken, match=r"rank 0, 8\.00 ms: backward uses parameters that are gathering"):
        only("events", with_(2, end=8.5e-3))
    with pytest.raises(Broken, match="backward uses parameters that are freed"):
        only("holdings", lambda many: [replace(h, parameters=50) if h.time > 5e-3 else h for h in many])
    with pytest.raises(Broken, match="freed twice: less than at rest is left"):
        only("holdings", with_(8, parameters=49))
    with pytest.raises(Broken, match="optimizer steps while gradients are being reduced"):
        only("events", with_(4, end=12.5e-3))
    with pytest.raises(Broken, match="part of the gradient is held that no collective reduced"):
        only("events", without(4))


def test_a_collective_that_serves_no_known_block_is_in_flight_all_the_same():
    film = only("events", lambda many: [*many, Event("collective", "all_reduce", 0, 4.6e-3, 5e-3, 8, group_size=2)])
    (begins,) = [frame for frame in film.frames if frame.words == "rank 0: all-reduce begins"]
    assert begins.flights[0][0].blocks == ()
    assert film.data()["frames"][film.frames.index(begins)]["flights"] == [["all-reduce", [], [0]]]


# What the recorder samples


def test_holdings_are_the_bytes_of_each_block():
    model = Transformer(TransformerConfig(layers=2, width=16, heads=2, length=8, tied=True, frozen=True))
    whole = unsharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.zeros(2, 9, dtype=torch.long)
    with record(model, optimizer, holdings=True) as recording:
        model(text[:, :-1].contiguous(), text[:, 1:].contiguous()).backward()
        optimizer.step()
    for block, (parameters, gradients, states) in whole.items():
        mine = [h for h in recording.holdings if h.block == block]
        assert {h.parameters for h in mine} == {parameters}
        assert (mine[0].gradients, mine[-1].gradients) == (0, gradients)
        scalars = 4 * sum(1 for name, p in model.named_parameters() if p.requires_grad and (
            name.startswith(block) if block else not name.startswith("blocks")))  # fmt: skip
        assert (mine[0].optimizer, mine[-1].optimizer) == (0, states + scalars)
    assert sum(p for p, _, _ in whole.values()) == sum(p.nbytes for p in model.parameters())
    assert [h.at for h in recording.holdings if h.block == "blocks.0"][:2] == ["start", "forward"]
    times = [h.time for h in recording.holdings]
    assert times == sorted(times)


def test_freed_memory_is_seen_although_the_tensor_lives_on():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))

    def free(module, inputs, output):
        module.weight.untyped_storage().resize_(0)

    model[0].register_forward_hook(free)
    with torch.no_grad(), record(model, holdings=True) as recording:
        model(torch.ones(1, 10))
    assert [h.parameters for h in recording.holdings if h.block == "0"] == [400, 400, 0]
    assert {h.parameters for h in recording.holdings if h.block == "1"} == {400}


def test_without_holdings_nothing_is_sampled():
    model = nn.Sequential(nn.Linear(2, 2))
    with record(model) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert recording.holdings == []
    assert {event.blocks for event in recording.events} == {None}


# Film strip and player


@pytest.fixture(scope="module")
def film():
    return frames([gathered(0), gathered(1)])


def test_the_data_of_a_film_is_small_and_plain(film):
    data = film.data()
    assert json.loads(json.dumps(data)) == data
    assert len(json.dumps(data)) < 6000
    assert check(data) is data
    frame = data["frames"][2]
    assert (frame["words"], frame["phase"], frame["states"][12:16]) == (
        "all ranks: forward of block 0",
        "forward",
        "cabF",
    )
    assert data["table"][frame["held"][3]] == [150, 0, 100]


def test_a_thinned_curve_keeps_its_first_its_last_and_its_peak():
    curve = [(float(i), i if i != 123 else 9999) for i in range(1000)]
    kept = thinned(curve, 100)
    assert (kept[0], kept[-1], max(b for _, b in kept)) == (curve[0], curve[-1], 9999)
    assert 50 <= len(kept) <= 101
    assert kept == sorted(kept)
    assert thinned(curve[:7], 100) == curve[:7]


def test_film_strip_is_a_picture_with_stable_words(film):
    data = film.data()
    assert chosen(data) == [0, 2, 5, 7, 11]
    picture = filmstrip(data)
    assert picture.alt == "[figure: what each rank holds, frame by frame]"
    words = [text.get_text() for text in picture.findobj(lambda a: hasattr(a, "get_text"))]
    assert "3  backward of block 0" in words or "3 backward of block 0" in words
    two = filmstrip(data, data, frames=[0, 1])
    assert two.get_figheight() > filmstrip(data, frames=[0, 1]).get_figheight()
    assert len(png(two)) < 100_000
    many = data | {"curves": [[] for _ in data["curves"]]}
    assert "no memory curve was recorded" in [
        text.get_text() for text in filmstrip(many).findobj(lambda a: hasattr(a, "get_text"))
    ]


def test_what_is_no_film_is_refused(film):
    with pytest.raises(ValueError, match="film is int"):
        check(3)
    with pytest.raises(ValueError, match="'frames'"):
        check({key: value for key, value in film.data().items() if key != "frames"})
    with pytest.raises(ValueError, match="no frames"):
        check(film.data() | {"frames": []})
    with pytest.raises(ValueError, match=r"frames \[0, .* do not have 6 cells"):
        check(film.data() | {"ranks": ["rank 0", "rank 1", "rank 2"]})
    with pytest.raises(ValueError, match="0 films given"):
        ShardLifecycle()
    with pytest.raises(ValueError, match="step is 12: it must be from 0 to 11"):
        ShardLifecycle(film, step=12)


def test_the_player_stores_a_picture_and_words_that_no_run_changes(film):
    player = ShardLifecycle(film, step=3)
    data, metadata = player._repr_mimebundle_()
    assert metadata["image/png"]["alt"].startswith("Shard lifecycle: FSDP2, reshard after forward, 2 ranks; columns:")
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in data
    slower = [replace(one, recording=replace(one.recording, seconds=0.02)) for one in (gathered(0), gathered(1))]
    again, _ = ShardLifecycle(frames(slower), step=1)._repr_mimebundle_()
    assert data["text/plain"] == again["text/plain"]
    assert data["text/plain"].splitlines() == [
        "[shard lifecycle: FSDP2, reshard after forward, 2 ranks; columns: root, block 0]",
        "at the start: P full or shard, G none, O full or shard",
        "at the end: P full or freed, G none or shard, O full or shard",
    ]


def test_two_films_wait_for_each_other_in_each_phase(film):
    data = film.data()
    short = data | {"frames": [frame for i, frame in enumerate(data["frames"]) if i not in (1, 3, 4, 10)]}
    steps = aligned([data, short])
    assert {own for own, _ in steps} == set(range(12))
    assert {other for _, other in steps} == set(range(8))
    for own, other in steps:
        assert data["frames"][own]["phase"] == short["frames"][other]["phase"]
    assert steps == sorted(steps)


def test_a_frames_words_end_before_the_next_frame_begins(film):
    data = film.data()
    for frame in data["frames"]:
        frame["words"] = "reduce-scatter of block 2's gradients ends, and of what is in no block"
    picture = filmstrip(data)
    picture.canvas.draw()
    captions = [text for text in picture.texts if text.get_text()[:1].isdigit()]
    assert len(captions) > 3 and all(text.get_text().endswith(" …") for text in captions)
    spans = [text.get_window_extent() for text in captions]
    for one, other in itertools.pairwise(spans):
        assert one.y0 != other.y0 or one.x1 < other.x0
