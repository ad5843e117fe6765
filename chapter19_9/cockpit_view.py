"""The cockpit's pictures: memory, a step's peak, its timeline, what it sent, the loss; each beside the run before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from d2l_utils import plots
from d2l_utils.figure import together

if TYPE_CHECKING:
    from chapter19_9.cockpit import Flown

    Runs = Mapping[str, Flown]

SHOWS = ("memory", "time", "sent", "loss", "player")  # what the cockpit shows unless told otherwise


def sheet(flown: Flown, before: Flown | None = None, pictures: Sequence[str] = SHOWS[:-1], columns: int = 2) -> Figure:
    """Pictures of a run, the run before in them too. Which runs they are is said once."""
    both = [(word, one, other) for word, one, other in (("before", before, flown), ("now", flown, before)) if one]
    runs = {f"{word}\n{one.name(other)}": one for word, one, other in both}
    said = "memory" in pictures
    short = {word if said else f"{word}: {one.name(other)}".replace("\n", ", "): one for word, one, other in both}
    return together([PICTURES[name](flown, before, runs, short) for name in pictures], columns)


def _memory(flown: Flown, before: Flown | None, runs: Runs, short: Runs) -> Figure:
    return plots.memory_bars(
        {label: one.held for label, one in runs.items()},
        {label: one.held_formula for label, one in runs.items()},
        title=f"At rest; at the peak {flown.peak / 1e6:.2f} MB",
    )


def _peak(flown: Flown, before: Flown | None, runs: Runs, short: Runs) -> Figure:
    inside = {
        "at rest": {word: one.held.total / 1e6 for word, one in short.items()},
        "saved for backward": {word: one.saved / 1e6 for word, one in short.items()},
        "at the peak": {word: one.peak / 1e6 for word, one in short.items()},
    }
    return plots.panels({"MB": inside}, title="Inside a step, on the fullest rank")


def _sent(flown: Flown, before: Flown | None, runs: Runs, short: Runs) -> Figure:
    sent = {
        "logical": {word: one.sent / 1e6 for word, one in short.items()},
        "formula": {word: one.sent_formula / 1e6 for word, one in short.items()},
    }
    title = "Sent by each rank in a step"
    if all(one.wire is not None for one in short.values()):
        sent["on the wire"] = {word: (one.wire or 0.0) / 1e6 for word, one in short.items()}
    else:
        title += "; on the wire: not carried by sockets"
    return plots.panels({"MB": sent}, title=title)


def _time(flown: Flown, before: Flown | None, runs: Runs, short: Runs) -> Figure:
    lanes = {"now, rank 0": flown.run.results[0].recording}
    if before is not None:
        lanes = {"before, rank 0": before.run.results[0].recording} | lanes
    return plots.timeline(lanes, title=f"One step, recorded; unrecorded it took {flown.seconds * 1e3:.0f} ms")


def _loss(flown: Flown, before: Flown | None, runs: Runs, short: Runs) -> Figure:
    losses = {word: one.run.results[0].losses for word, one in short.items()}
    return plots.curves(losses, title="Loss over the global batch", x="step", y="nats")


PICTURES = {"memory": _memory, "peak": _peak, "time": _time, "sent": _sent, "loss": _loss}
