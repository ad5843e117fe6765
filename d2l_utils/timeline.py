"""A step as it happened: what each rank computed and what it sent, and how much of the sending was hidden."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from d2l_utils import figure as style

Span = tuple[float, float]

_COMPUTE = {
    "forward": ("forward", "#9ecae8", ""),
    "backward": ("backward", style.ORANGE, ""),
    "optimizer": ("optimizer", style.GREEN, "..."),
    "wait": ("waiting", "white", "////"),
}
_HIDDEN = ("communication, hidden", "#e6b8d0", "")
_EXPOSED = ("communication, exposed", style.VERMILION, "\\\\\\\\")


class Overlap(NamedTuple):
    """Seconds of one rank's communication that ran beside its own computing, and seconds that did not."""

    hidden: float
    exposed: float


def overlap(events: Iterable[Any]) -> Overlap:
    """Split one rank's collective time by whether that rank computed meanwhile.

    Computing is forward, backward and optimizer less wait. Collectives at the same time count once.
    Events have `kind`, `start` and `end` in seconds.
    """
    events = list(events)
    sending, busy = _sending(events), _busy(events)
    hidden = _length(_both(sending, busy))
    return Overlap(hidden, _length(sending) - hidden)


def timeline(events_by_rank: Any, *, title: str | None = None, ranks: int = 4) -> Figure:
    """Two lanes a rank: computing above, communication below; hidden and exposed milliseconds at the right.

    Arguments:
        events_by_rank: each rank's events, or {label: events}. An event has `kind` ("forward", "backward",
            "optimizer", "collective" or "wait"), `name`, `start` and `end` in seconds.
        ranks: draw at most so many rows; how many were left out is said.
    """
    named = isinstance(events_by_rank, Mapping)
    rows = {str(k) if named else f"rank {k}": list(v)
            for k, v in (events_by_rank.items() if named else enumerate(events_by_rank))}  # fmt: skip
    if not rows or not any(rows.values()):
        raise ValueError("events_by_rank holds no events")
    shown = dict(list(rows.items())[: max(1, ranks)])
    end = max(e.end for events in shown.values() for e in events) * 1e3

    picture, (axes,) = style.picture("timeline of one step", 1.05 + 0.72 * len(shown))
    kinds: set[str] = set()
    short_names: set[str] = set()
    for row, (label, events) in enumerate(shown.items()):
        base = 2.5 * (len(shown) - 1 - row)
        for event in sorted(events, key=lambda e: e.start - (e.kind == "wait") * -1e9):
            if event.kind in _COMPUTE:
                _, colour, hatch = _COMPUTE[event.kind]
                _block(axes, event.start, event.end, base + 1, colour, hatch, event.name, end)
                kinds.add(event.kind)
        busy = _busy(events)
        for event in events:
            if event.kind == "collective":
                span = [(event.start, event.end)]
                for start, stop in _both(span, busy):
                    _block(axes, start, stop, base, *_HIDDEN[1:], "", end)
                for start, stop in _less(span, busy):
                    _block(axes, start, stop, base, *_EXPOSED[1:], "", end)
                if _outline(axes, event, base, end) == _initials(event.name):
                    short_names.add(f"{_initials(event.name)}  {event.name}")
        hidden, exposed = overlap(events)
        if any(e.kind == "collective" for e in events):
            words = f"{style.short(hidden * 1e3)} ms hidden\n{style.short(exposed * 1e3)} ms exposed"
        else:
            words = "no communication"
        axes.text(1.015, base + 1, words, transform=axes.get_yaxis_transform(), fontsize=8.5, va="center")
        axes.text(-0.085, base + 1, label, transform=axes.get_yaxis_transform(), fontsize=9, va="center", ha="right",
                  fontweight="bold")  # fmt: skip
        for lane, y in (("compute", base + 1.5), ("comm.", base + 0.5)):
            axes.text(-0.01, y, lane, transform=axes.get_yaxis_transform(), fontsize=7.5, va="center", ha="right",
                      color=style.MUTED)  # fmt: skip
        if row:
            axes.axhline(base + 2.25, color=style.RULE, lw=0.8)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.1, 2.5 * len(shown) - 0.4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    left_out = f"  ({len(rows) - len(shown)} more ranks not drawn)" if len(rows) > len(shown) else ""
    axes.set_xlabel(f"ms since the step began{left_out}", fontsize=9)
    sent = any(e.kind == "collective" for events in shown.values() for e in events)
    style.key(picture, _handles(kinds, sent) + [Patch(fc="none", ec="none", label=name) for name in sorted(short_names)],
              columns=4)  # fmt: skip
    style.title(picture, title)
    return picture


def _block(axes: Any, start: float, stop: float, y: float, colour: str, hatch: str, name: str, end: float) -> None:
    start, stop = start * 1e3, stop * 1e3
    edge = style.MUTED if hatch == "////" else "white"
    axes.add_patch(Rectangle((start, y), stop - start, 1, fc=colour, ec=edge, hatch=hatch, lw=0.6))
    if not hatch:
        # "block 3" where it fits, else its number.
        _name(axes, (start, stop), y, (name, "".join(name.split(" ")[-1:]).rpartition(".")[2]), end)


def _outline(axes: Any, event: Any, y: float, end: float) -> str:
    """One frame around a collective whatever its parts; returns the name that fitted."""
    start, stop = event.start * 1e3, event.end * 1e3
    axes.add_patch(Rectangle((start, y), stop - start, 1, fc="none", ec=style.INK, lw=0.8))
    patch = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
    return _name(axes, (start, stop), y, (event.name, _initials(event.name)), end, bbox=patch)


def _name(axes: Any, span: Span, y: float, names: Sequence[str], end: float, **text: Any) -> str:
    """Write the first of `names` that fits between the two times, if any does."""
    for name in names:
        if name and (span[1] - span[0]) / end > 0.0118 * len(name) + 0.006:
            axes.text(sum(span) / 2, y + 0.5, name, fontsize=7.5, ha="center", va="center", color=style.INK, **text)
            return name
    return ""


def _initials(name: str) -> str:
    return "".join(word[0].upper() for word in name.split("_") if word)


def _handles(kinds: set[str], sent: bool) -> list[Any]:
    entries = [entry for kind, entry in _COMPUTE.items() if kind in kinds] + ([_HIDDEN, _EXPOSED] if sent else [])
    return [Patch(fc=colour, hatch=hatch, ec=style.MUTED, lw=0.6, label=name) for name, colour, hatch in entries]


def _sending(events: Sequence[Any]) -> list[Span]:
    return _union((e.start, e.end) for e in events if e.kind == "collective")


def _busy(events: Sequence[Any]) -> list[Span]:
    computing = _union((e.start, e.end) for e in events if e.kind in ("forward", "backward", "optimizer"))
    return _less(computing, _union((e.start, e.end) for e in events if e.kind == "wait"))


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _both(first: Iterable[Span], second: Sequence[Span]) -> list[Span]:
    """Where spans of both lists run; each list is sorted and without overlaps."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, stop) for start, stop in pairs if start < stop]


def _less(first: Iterable[Span], second: Sequence[Span]) -> list[Span]:
    """The parts of `first` outside `second`."""
    rest: list[Span] = []
    for start, stop in first:
        for a, b in second:
            if a < stop and b > start:
                if a > start:
                    rest.append((start, a))
                start = max(start, b)
        if start < stop:
            rest.append((start, stop))
    return rest


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)
