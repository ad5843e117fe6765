"""Horizontal stacked bars against a limit: what takes how much of a device."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from d2l_utils import figure as style


def stacks(
    bars: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, tuple[str, str, str]],
    *,
    limit: float | None = None,
    room: float | None = None,
    marked: str | None = None,
    dots: Mapping[str, float] | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> Figure:
    """One bar for each label, its parts end to end, longest allowed length drawn as a line.

    Arguments:
        bars: {label: {part: bytes}}.
        parts: {part: (name, colour, hatch)}, in the order in which they are laid.
        limit, room: bytes that there are, and that may be filled; bars longer than the axis end in an arrow.
        marked: label of the bar to point at.
        dots: {label: bytes} measured totals, drawn as diamonds.
        unit: "MB", "GB", "GiB", ... (default: the decimal unit that fits).
    Raises ValueError for no bars, an unknown part or unit, or a dot for a label without a bar.
    """
    if not bars:
        raise ValueError("bars is empty; it needs at least one entry")
    if unknown := sorted({part for bar in bars.values() for part in bar} - set(parts)):
        raise ValueError(f"bars has part {unknown[0]!r}; allowed: {', '.join(parts)}")
    dots = dots or {}
    if strange := sorted(set(dots) - set(bars)):
        raise ValueError(f"dots has {strange[0]!r}, which bars has not: {', '.join(bars)}")
    totals = {label: sum(bar.values()) for label, bar in bars.items()}
    scale, unit = style.unit_for([limit] if limit else [*totals.values(), *dots.values()], unit)
    longest = max(totals.values()) / scale
    edge = longest * 1.13 if limit is None else max(1.35 * limit / scale, min(longest * 1.13, 2.4 * limit / scale))
    picture, (axes,) = style.picture("stacked bars", 1.25 + 0.27 * len(bars))
    for at, (label, bar) in enumerate(bars.items()):
        base = 0.0
        for part, (_, colour, hatch) in parts.items():
            length = bar.get(part, 0.0) / scale
            if length and base < edge:
                axes.barh(at, min(length, edge - base), 0.66, base, color=colour, hatch=hatch, ec="white", lw=0.6)
            base += length
        over = base > edge * 0.9
        words = f"{style.short(base)} {'→' if base > edge else ''}"
        box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
        style.note(
            axes, min(base, edge), at, words, (-4, 0) if over else (5, 0), ha="right" if over else "left",
            bbox=box, fontweight="bold" if label == marked else "normal",
        )  # fmt: skip
        if label in dots:
            axes.plot(dots[label] / scale, at, "D", ms=5, mfc="white", mec=style.INK, mew=1.3, clip_on=False)
    handles: list[Any] = [
        Patch(fc=colour, hatch=hatch, ec="white", label=name)
        for part, (name, colour, hatch) in parts.items()
        if any(bar.get(part) for bar in bars.values())
    ]
    for value, name, dash in ((limit, "device memory", "-"), (room, "to fill", (0, (3, 2)))):
        if value is not None:
            axes.axvline(value / scale, color=style.INK, ls=dash, lw=1.6)
            handles.append(Line2D([], [], color=style.INK, ls=dash, lw=1.6, label=name))
    if dots:
        handles.append(Line2D([], [], ls="", marker="D", mfc="white", mec=style.INK, mew=1.3, label="measured"))
    axes.set_yticks(range(len(bars)), [f"▸ {label}" if label == marked else label for label in bars])
    for tick, label in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if label == marked else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, edge)
    axes.set_xlabel(f"{unit} on one rank, at the fullest moment", fontsize=9, color=style.INK)
    axes.grid(axis="x", color=style.RULE, lw=0.7)
    style.key(picture, handles, columns=5)
    style.title(picture, title)
    return picture
