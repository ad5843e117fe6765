"""A step as it happened: what each rank computed and what it sent, and how much of the sending was hidden."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from d2l_utils import figure as style
from d2l_utils.events import (
    COMPUTE,
    Event,
    Interval,
    by_rank,
    difference,
    hidden_and_exposed,
    intersection,
    union,
)

_COMPUTE = {
    "forward": ("forward", "#9ecae8", ""),
    "backward": ("backward", style.ORANGE, ""),
    "optimizer": ("optimizer", style.GREEN, "..."),
    "wait": ("waiting", "white", "////"),
}
_HIDDEN = ("communication, hidden", "#e6b8d0", "")
_EXPOSED = ("communication, exposed", style.VERMILION, "\\\\\\\\")

_LANE, _GAP = 0.5, 0.5  # height of one lane of several, and between ranks; a single lane has height 1


def timeline(events_by_rank: Any, *, title: str | None = None, ranks: int = 4) -> Figure:
    """Two lanes a rank: computing above, communication below; hidden and exposed milliseconds at the right.

    Arguments:
        events_by_rank: each rank's events, or {label: events}. An event has `kind` ("forward", "backward",
            "optimizer", "collective" or "wait"), `name`, `start` and `end` in seconds. A recording does, too.
        ranks: draw at most so many rows; how many were left out is said.
    """
    rows: dict[str, list[Event]] = _rows(events_by_rank)
    shown = dict(list(rows.items())[: max(1, ranks)])
    end = max(e.end for events in shown.values() for e in events if e.end is not None) * 1e3

    placed = {
        label: _lanes([e for e in events if e.kind == "collective" and e.end is not None])
        for label, events in shown.items()
    }
    # A rank whose collectives overlap gets a lane for each that runs at once.
    depth = {
        label: max(1.0, _LANE * (1 + max((lane for _, lane in lanes), default=0))) for label, lanes in placed.items()
    }
    tall = sum(1 + deep + _GAP for deep in depth.values())
    picture, (axes,) = style.picture("timeline of one step", 1 + 0.3 * tall)
    kinds = {e.kind for events in shown.values() for e in events if e.end is not None and e.kind in _COMPUTE}
    short_names: set[str] = set()
    base = tall
    for row, (label, events) in enumerate(shown.items()):
        base -= 1 + _GAP * (row > 0)
        _compute(axes, events, base, end)
        short_names |= _communication(axes, placed[label], _busy(events), base, end)
        hidden, exposed, _ = hidden_and_exposed(events)
        words = f"{_time(hidden)} hidden\n{_time(exposed)} exposed" if placed[label] else "no communication"
        axes.text(1.015, base, words, transform=axes.get_yaxis_transform(), fontsize=8.5, va="center")
        _at_left(axes, base, label, 46, fontsize=9, fontweight="bold")
        _at_left(axes, base + 0.5, "compute", 5, fontsize=7.5, color=style.MUTED)
        _at_left(axes, base - min(depth[label], 1.2) / 2, "comm.", 5, fontsize=7.5, color=style.MUTED)
        if row:
            axes.axhline(base + 1 + _GAP / 2, color=style.RULE, lw=0.8)
        base -= depth[label]
    axes.set_xlim(0, end)
    axes.set_ylim(base - 0.15, tall + 0.1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    left_out = f"  ({len(rows) - len(shown)} more ranks not drawn)" if len(rows) > len(shown) else ""
    axes.set_xlabel(f"ms since the step began{left_out}", fontsize=9)
    initials = [Patch(fc="none", ec="none", label=name) for name in sorted(short_names)]
    handles = _handles(kinds, any(placed.values())) + initials
    picture.set_figheight(0.95 + 0.3 * tall + 0.19 * math.ceil(len(handles) / 4))
    style.key(picture, handles, columns=4)
    style.title(picture, title)
    return picture


def _at_left(axes: Any, y: float, words: str, points: float, **text: Any) -> None:
    """Words that end so many typographic points left of the lanes."""
    axes.annotate(
        words, (0, y), xycoords=axes.get_yaxis_transform(), xytext=(-points, 0), textcoords="offset points",
        va="center", ha="right", **text,
    )  # fmt: skip


def _compute(axes: Any, events: Sequence[Event], base: float, end: float) -> None:
    # Waiting lies inside the backward that waits: it is the last kind, on top.
    for kind, (_, colour, hatch) in _COMPUTE.items():
        mine = [(event, (event.start, event.end)) for event in events if event.kind == kind and event.end is not None]
        edge = style.MUTED if kind == "wait" else "white"
        _draw(axes, [_box(span, base, 1) for _, span in mine], facecolors=colour, edgecolors=edge, hatch=hatch)
        for event, span in mine if not hatch else ():
            # "block 3" where it fits, else its number.
            _name(axes, span, base + 0.5, (event.name, event.name.split(" ")[-1].rpartition(".")[2]), end)


def _communication(
    axes: Any, placed: Sequence[tuple[Event, int]], busy: list[Interval], base: float, end: float
) -> set[str]:
    """Draw below `base`; returns the initials that stand for a name that did not fit."""
    short_names = set()
    boxes: dict[tuple[str, str], list[Any]] = {_HIDDEN[1:]: [], _EXPOSED[1:]: []}
    frames = []  # one around a collective whatever its parts
    high = 1.0 if all(lane == 0 for _, lane in placed) else _LANE
    for event, lane in placed:
        span = (event.start, event.end or event.start)
        y = base - high * (lane + 1)
        hidden = _without_gaps(intersection([span], busy), end * 1e-3 / 300)
        boxes[_HIDDEN[1:]] += [_box(part, y, high) for part in hidden]
        boxes[_EXPOSED[1:]] += [_box(part, y, high) for part in difference([span], hidden)]
        frames.append(_box(span, y, high))
        patch = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
        names, size = (event.name, _initials(event.name)), 7.5 if high == 1 else 6
        if _name(axes, span, y + high / 2, names, end, size, bbox=patch) == _initials(event.name):
            short_names.add(f"{_initials(event.name)}  {event.name}")
    for (colour, hatch), corners in boxes.items():
        _draw(axes, corners, facecolors=colour, edgecolors="white", hatch=hatch)
    _draw(axes, frames, facecolors="none", edgecolors=style.INK, linewidths=0.8)
    return short_names


def _draw(axes: Any, corners: list[Any], **look: Any) -> None:
    """All boxes that look alike at once: one by one takes seconds where there are hundreds."""
    axes.add_collection(PolyCollection(corners, **{"linewidths": 0.6} | look), autolim=False)


def _box(span: Interval, y: float, high: float) -> list[tuple[float, float]]:
    """Corners, in milliseconds and lanes."""
    start, stop = span[0] * 1e3, span[1] * 1e3
    return [(start, y), (stop, y), (stop, y + high), (start, y + high)]


def _without_gaps(parts: Sequence[Interval], gap: float) -> list[Interval]:
    """The parts, joined over gaps that are too short to be seen: fifty collectives that are under way together would
    be cut into thousands of slivers."""
    joined: list[Interval] = []
    for start, stop in parts:
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _time(seconds: float) -> str:
    """Milliseconds to a tenth, and no finer: the clock's reading is not the last digit's. Microseconds where that is 0.0,
    as on a device, whose clock is finer."""
    if 0 < seconds < 0.05e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds >= 0.5e-6 else "under 1 µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _rows(events_by_rank: Any) -> dict[str, list[Event]]:
    if isinstance(events_by_rank, Mapping):
        rows = {f"rank {k}" if isinstance(k, int) else str(k): _events(v) for k, v in events_by_rank.items()}
    else:
        rows = {f"rank {rank}": events for rank, events in by_rank(events_by_rank).items()}
    if empty := [label for label, events in rows.items() if all(e.end is None for e in events)] or not rows:
        raise ValueError(f"events_by_rank holds no finished events{f' for {empty}' if rows else ''}")
    return rows


def _events(item: Any) -> list[Event]:
    return list(getattr(item, "events", item))


def _busy(events: Sequence[Event]) -> list[Interval]:
    """When this rank computed and did not wait."""
    ended = [(e.kind, (e.start, e.end)) for e in events if e.end is not None]
    waits = union(span for kind, span in ended if kind == "wait")
    return difference(union(span for kind, span in ended if kind in COMPUTE), waits)


def _name(axes: Any, span: Interval, y: float, names: Sequence[str], end: float, size: float = 7.5, **text: Any) -> str:
    """Write the first of `names` that fits between the two times, if any does."""
    start, stop = span[0] * 1e3, span[1] * 1e3
    for name in names:
        if name and (stop - start) / end > (0.0118 * len(name) + 0.006) * size / 7.5:
            look = {"fontsize": size, "ha": "center", "va": "center", "color": style.INK}
            # It lies inside the axes: measuring it for the layout takes as long as drawing it.
            axes.text((start + stop) / 2, y, name, **look | text).set_in_layout(False)
            return name
    return ""


def _initials(name: str) -> str:
    return "".join(word[0].upper() for word in name.split("_") if word)


def _handles(kinds: set[str], sent: bool) -> list[Any]:
    entries = [entry for kind, entry in _COMPUTE.items() if kind in kinds] + ([_HIDDEN, _EXPOSED] if sent else [])
    return [Patch(fc=colour, hatch=hatch, ec=style.MUTED, lw=0.6, label=name) for name, colour, hatch in entries]


def _lanes(collectives: Sequence[Event]) -> list[tuple[Event, int]]:
    """Each collective with the first lane free at its start: DDP launches the next while one still runs."""
    free: list[float] = []
    placed = []
    for event in sorted(collectives, key=lambda e: e.start):
        lane = next((at for at, until in enumerate(free) if until <= event.start), len(free))
        free[lane : lane + 1] = [event.end or event.start]
        placed.append((event, lane))
    return placed
