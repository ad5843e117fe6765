"""What every rank holds of every block at every moment of a recorded step, as frames.

    film = lifecycle("fsdp2", world_size=4)      # real ranks, one recorded step
    film.frames[10].words, film.frames[10].cells[rank][block]

Nothing here knows what a strategy ought to do: states follow from bytes that were held and collectives that ran.
A frame is one event on the ranks that it happened on, each rank at its own moment of it: so a frame may show
moments that lie some milliseconds apart, but never an effect before its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chapter19_9 import strategies
from chapter19_9.moments import Change, Flight, thinned
from chapter19_9.passes import passes
from chapter19_9.ranks_view import Broken, RankView

if TYPE_CHECKING:
    from chapter19_9.recorded import Recorded
    from d2l_utils.transformer import TransformerConfig

__all__ = ["Broken", "Cell", "Flight", "Frame", "Lifecycle", "frames", "lifecycle"]

# State of a cell: how it is written, and how it is drawn. "old" is memory that is kept, with nothing of use in it.
STATES = {
    "parameters": {
        "shard": ("shard", "part"),
        "gathering": ("filling", "moving"),
        "full": ("full", "whole"),
        "freed": ("freed", "gone"),
    },
    "gradients": {
        "none": ("none", "none"),
        "kept": ("old", "stale"),
        "computing": ("growing", "moving"),
        "full": ("full own", "whole"),
        "reducing": ("reducing", "moving"),
        "mean": ("full mean", "whole"),
        "shard": ("shard", "part"),
        "shard_kept": ("shard + old", "whole"),
    },
    "optimizer": {"none": ("none", "none"), "shard": ("shard", "part"), "full": ("full", "whole")},
}


@dataclass(frozen=True)
class Cell:
    """What one rank holds of one block: a state of each kind, the bytes behind it, and what is computed on it."""

    parameters: str
    gradients: str
    optimizer: str
    bytes: tuple[int, int, int]
    busy: str = ""


@dataclass(frozen=True)
class Frame:
    """One event, and what all ranks hold then.

    words   : the event, for a reader.
    ranks   : the ranks on which it happens now; the others are where they were.
    times   : each rank's own moment, in seconds since the first rank began.
    phase   : "forward", "backward" or "optimizer".
    cells   : by rank, then by block.
    flights : collectives in flight, with the ranks that are in them.
    held    : bytes of all tensors on each rank, or None where no memory curve was recorded.
    """

    words: str
    ranks: tuple[int, ...]
    times: tuple[float, ...]
    phase: str
    cells: tuple[tuple[Cell, ...], ...]
    flights: tuple[tuple[Flight, tuple[int, ...]], ...]
    held: tuple[int | None, ...]


@dataclass(frozen=True)
class Lifecycle:
    """The frames of one recorded step.

    blocks : names of the columns, "" is everything that is in no block: ``rest``.
    whole  : by block, bytes of its unsharded parameters, gradients, optimizer states.
    curves : by rank, (seconds, bytes) of all tensors.
    """

    title: str
    blocks: tuple[str, ...]
    rest: tuple[str, ...]
    whole: Mapping[str, tuple[int, int, int]]
    frames: tuple[Frame, ...]
    curves: tuple[tuple[tuple[float, int], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.curves)

    def data(self) -> dict[str, Any]:
        """For ``ShardLifecycle`` and ``filmstrip``: plain and compact, a few kilobytes."""
        codes = {kind: {state: chr(97 + i) for i, state in enumerate(of)} for kind, of in STATES.items()}
        busy = {"": ".", "forward": "F", "backward": "B", "optimizer": "O"}
        table: dict[tuple[int, int, int], int] = {}
        shown = []
        for frame in self.frames:
            cells = [cell for row in frame.cells for cell in row]
            shown.append(
                {
                    "words": frame.words,
                    "on": list(frame.ranks),
                    "ms": [round(time * 1e3, 2) for time in frame.times],
                    "phase": frame.phase,
                    "states": "".join(
                        "".join(codes[kind][getattr(cell, kind)] for kind in STATES) + busy[cell.busy] for cell in cells
                    ),
                    "held": [table.setdefault(cell.bytes, len(table)) for cell in cells],
                    "flights": [
                        [flight.short, [self.blocks.index(b) for b in flight.blocks], list(ranks)]
                        for flight, ranks in frame.flights
                    ],
                    "bytes": list(frame.held),
                }
            )
        kinds = zip(STATES, "PGO", strict=True)
        return {
            "title": self.title,
            "ranks": [f"rank {rank}" for rank in range(self.ranks)],
            "columns": [_name(block) for block in self.blocks],
            "notes": [", ".join(self.rest) if not block else "" for block in self.blocks],
            "whole": [list(self.whole[block]) for block in self.blocks],
            "kinds": [
                {
                    "letter": letter,
                    "name": kind.replace("optimizer", "optimizer states"),
                    "states": {codes[kind][state]: list(shape) for state, shape in STATES[kind].items()},
                }
                for kind, letter in kinds
            ],
            "frames": shown,
            "table": [list(key) for key in table],
            "curves": [
                [[round(t * 1e3, 2), b] for t, b in thinned(curve, 200)] if curve else [] for curve in self.curves
            ],
        }


def lifecycle(
    strategy: str,
    config: TransformerConfig | None = None,
    *,
    world_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    batch: int = 8,
    timeout: float = 120,
) -> Lifecycle:
    """Record one step of a strategy on real ranks and turn it into frames. Arguments as in ``train``."""
    from chapter19_9.train import DEFAULT, train
    from d2l_utils import launch

    run = launch(
        train, world_size=world_size, output="quiet", timeout=timeout, strategy=strategy,
        config=config or DEFAULT, options=dict(options or {}), batch=batch,
        steps=3, lifecycle_step=2,
    )  # fmt: skip
    return frames([result.lifecycle for result in run.results])


def frames(recorded: Sequence[Recorded], title: str | None = None) -> Lifecycle:
    """The frames of one step, from all ranks' recordings.

    Raises Broken where the recordings break a rule (see ``RankView.check``), ValueError where they are not those of one
    step: none, ranks missing, nothing held recorded; and where that step has several passes.
    """
    recorded = sorted(recorded, key=lambda one: one.recording.rank)
    sizes = {one.recording.world_size for one in recorded}
    ranks = [one.recording.rank for one in recorded]
    if not recorded or len(sizes) > 1 or ranks != list(range(sizes.pop())):
        raise ValueError(f"recorded has ranks {ranks}: it must have one recording of every rank")
    if missing := [one.recording.rank for one in recorded if not one.recording.holdings]:
        raise ValueError(f"recordings of ranks {missing} have no holdings: record(..., holdings=True)")
    if (several := max(len(passes(one)) for one in recorded)) > 1:
        raise ValueError(f"recorded is a step of {several} passes: frames are of a step of one")
    began = min(one.recording.began or 0 for one in recorded)
    views = [RankView(one.recording, one.whole, began, one.start) for one in recorded]
    for view in views:
        view.check()
    if title is None:
        title = f"{strategies.get(recorded[0].strategy).title}, {len(recorded)} rank{'s' * (len(recorded) > 1)}"
    blocks = tuple(recorded[0].whole)
    made = tuple(_frames(views, blocks))
    ran = [event.name for event in recorded[0].recording.events if event.kind == "forward"]
    rest = tuple(dict.fromkeys(name for name in ran if name not in blocks))
    return Lifecycle(title, blocks, rest, recorded[0].whole, made, tuple(tuple(view.curve) for view in views))


def _frames(views: Sequence[RankView], blocks: Sequence[str]) -> Iterable[Frame]:
    moments: list[tuple[Change, dict[int, float]]] = []
    latest = [-1] * len(views)
    every = [
        (change.time, rank, number) for rank, view in enumerate(views) for number, change in enumerate(view.changes)
    ]
    for time, rank, place in sorted(every):
        change = views[rank].changes[place]
        # A rank that comes later to what others already did joins them there, if it has done nothing else since.
        for number in range(latest[rank] + 1, len(moments)):
            if moments[number][0].same(change) and rank not in moments[number][1]:
                break
        else:
            number = len(moments)
            moments.append((change, {}))
        moments[number][1][rank] = time
        latest[rank] = number
    now = [view.changes[0].time for view in views]
    phase = "forward"
    for change, when in moments:
        for rank, time in when.items():
            now[rank] = time
        phase = change.phase or phase
        flying: dict[Flight, list[int]] = {}
        for rank, view in enumerate(views):
            for flight in view.in_flight(now[rank]):
                flying.setdefault(flight.alike(), []).append(rank)
        yield Frame(
            words=f"{_who(sorted(when), len(views))}: {change.words(_name)}",
            ranks=tuple(sorted(when)),
            times=tuple(now),
            phase=phase,
            cells=tuple(
                tuple(_cell(view, block, time) for block in blocks) for view, time in zip(views, now, strict=True)
            ),
            flights=tuple((flight, tuple(ranks)) for flight, ranks in flying.items()),
            held=tuple(view.bytes_at(time) for view, time in zip(views, now, strict=True)),
        )


def _cell(view: RankView, block: str, time: float) -> Cell:
    return Cell(
        view.parameters(block, time), view.gradients(block, time), view.optimizer(block, time),
        view.held(block, time), view.busy(block, time),
    )  # fmt: skip


def _who(ranks: Sequence[int], n: int) -> str:
    if len(ranks) == n > 1:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _name(block: str) -> str:
    """A column's name: block 3, or root for what is in no block."""
    return f"block {block.rpartition('.')[2]}" if block else "root"
