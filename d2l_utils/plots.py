"""The pictures of the lessons: every function takes plain data and returns a Figure.

Each says its finding in `title` and its units on the axes, and tells things apart by colour *and* by hatch or
marker.

    png(curves({"averaged": [0, 0, 0]}, title="No drift", x="step", y="largest difference"))
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from d2l_utils import figure as style
from d2l_utils.boxes import batch, boxes, samples
from d2l_utils.figure import bundle, png
from d2l_utils.panels import panels
from d2l_utils.timeline import timeline

__all__ = [
    "batch", "boxes", "bundle", "curves", "memory_bars", "memory_curve", "panels", "png", "samples", "timeline",
]  # fmt: skip

PARTS = {
    "parameters": ("P  parameters", style.BLUE, ""),
    "gradients": ("G  gradients", style.ORANGE, "///"),
    "optimizer": ("O  optimizer states", style.GREEN, "..."),
}


def memory_bars(
    measured: Any,
    formula: Any = None,
    *,
    title: str | None = None,
    x: str = "",
    unit: str | None = None,
    mark: str = "formula",
) -> style.Picture:
    """Stacked P, G, O per rank (or per N), each level's formula beside it as a diamond.

    Arguments:
        measured: {label: held} or a sequence (labels are then "rank 0", "rank 1", ...). `held` has
            `parameters`, `gradients` and `optimizer` in bytes, as attributes, keys or in that order; None is
            "not yet allocated".
        formula: the same for what theory says, by the same labels; may cover only some of them.
        x: what the labels are; unit: "MB", "MiB", "GB", "GiB", ... (default: the decimal unit that fits).
        mark: what the diamonds are called: where the bars are the formula, they are measured.
    Raises:
        ValueError: no bars, or a formula for a label that was not measured.
    """
    bars = _labelled("measured", measured, "rank ")
    theory = {} if formula is None else _labelled("formula", formula, "rank ")
    if unknown := set(theory) - set(bars):
        raise ValueError(f"formula has {sorted(unknown)!r}, which measured has not: {list(bars)!r}")
    held = {label: parts(value) for label, value in bars.items()}
    expected = {label: parts(value) for label, value in theory.items()}
    sums = [sum(v or 0 for v in levels) for levels in (*held.values(), *expected.values())]
    scale, unit = style.unit_for(sums, unit)
    top = max(sums) / scale or 1.0

    picture, (axes,) = style.picture("memory bars: P, G, O", 3.1)
    width, missing = 0.56, False
    for at, (label, levels) in enumerate(held.items()):
        base = 0.0
        for value, (name, colour, hatch) in zip(levels, PARTS.values(), strict=True):
            if value is None:
                # Not a zero and not a guess: an empty dashed box of a fixed height.
                axes.bar(at, 0.09 * top, width, base, fc="none", ec=style.MUTED, ls=(0, (3, 2)), lw=1.2)
                style.note(axes, at, base + 0.045 * top, f"{name[0]} not yet", fontsize=7.5, color=style.MUTED)
                base, missing = base + 0.09 * top, True
                continue
            height = value / scale
            axes.bar(at, height, width, base, color=colour, hatch=hatch, ec="white", lw=0.8)
            if height > 0.07 * top:
                box = {"boxstyle": "round,pad=0.18", "fc": "white", "ec": "none"}
                style.note(axes, at, base + height / 2, style.short(height), bbox=box)
            base += height
        total = sum(v or 0 for v in levels) / scale
        style.note(axes, at, base, style.short(total), (0, 7), fontweight="bold")
        if label in expected:
            heights = np.cumsum([v or 0 for v in expected[label]]) / scale
            axes.plot([at + width / 2 + 0.07] * 3, heights, "D", ms=5, mfc="white", mec=style.INK, mew=1.3)
    _bars_frame(axes, list(held), top, x, f"{unit} per rank")
    handles: list[Any] = [Patch(fc=c, hatch=h, ec="white", label=name) for name, c, h in PARTS.values()]
    if expected:
        handles.append(Line2D([], [], ls="", marker="D", mfc="white", mec=style.INK, mew=1.3, label=mark))
    if missing:
        handles.append(Patch(fc="none", ec=style.MUTED, ls=(0, (3, 2)), label="not yet allocated"))
    style.key(picture, handles)
    style.title(picture, title)
    return picture


def curves(
    series: Mapping[str, Any],
    *,
    title: str | None = None,
    x: str = "",
    y: str = "",
    log: str = "",
    marks: Mapping[str, Any] | None = None,
) -> Figure:
    """Lines that differ in colour, dash and marker.

    Arguments:
        series: {name: ys} (xs are 0, 1, 2, ...), {name: (xs, ys)} or {name: {x: y}}.
        marks: points without a line (measurements on a formula's curve), given like series.
        log: "", "x", "y" or "xy". A logarithmic y axis that meets zeros keeps a 0 at its bottom.
    """
    if not set(log) <= {"x", "y"}:
        raise ValueError(f"log is {log!r}; allowed: '', 'x', 'y', 'xy'")
    picture, (axes,) = style.picture("curves", 2.9)
    data = {name: _points(name, value) for name, value in series.items()}
    dots = {name: _points(name, value) for name, value in (marks or {}).items()}
    many = [ys for _, ys in (*data.values(), *dots.values())]
    for at, (name, (xs, ys)) in enumerate(data.items()):
        marker = "" if len(xs) > 40 else style.MARKERS[at % 8]
        # A later line that lies on an earlier one must not hide it: wide lines first, narrow ones on top.
        axes.plot(
            xs, ys, label=name, color=style.SERIES[at % 8], ls=style.LINES[at % 8], marker=marker,
            lw=max(1.4, 2.6 - 0.4 * at), ms=5, mec="white", mew=0.6, clip_on=False,
        )  # fmt: skip
    for at, (name, (xs, ys)) in enumerate(dots.items()):
        marker = style.MARKERS[at % 8]
        axes.plot(xs, ys, label=name, ls="", marker=marker, ms=7, mfc="white", mec=style.INK, mew=1.4, clip_on=False)
    xticks = sorted({v for xs, _ in (*data.values(), *dots.values()) for v in xs})
    if "x" in log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xticks, [style.short(v) for v in xticks])
        axes.set_xticks([], minor=True)
    elif all(v.is_integer() for v in xticks):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(xticks) <= 10:
            axes.set_xticks(xticks, [style.short(v) for v in xticks])
    if "y" in log:
        _log_or_zero(axes, many)
    elif many and min(float(np.min(ys)) for ys in many if len(ys)) >= 0:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x, fontsize=9, color=style.INK)
    axes.set_ylabel(y, fontsize=9, color=style.INK)
    axes.grid(axis="y", color=style.RULE, lw=0.7)
    style.key(picture, axes.get_legend_handles_labels()[0] if len(data) + len(dots) > 1 else [])
    style.title(picture, title)
    return picture


def memory_curve(
    points_by_rank: Any, *, title: str | None = None, unit: str | None = None, events: Iterable[Any] = ()
) -> Figure:
    """Bytes over time inside one step, as steps, with each line's peak marked.

    Arguments:
        points_by_rank: per rank (or {label: ...}) the points: objects with `time` in seconds and `bytes`.
        events: of one rank; its forward, backward and optimizer phases are named above the curve.
    """
    lines = _labelled("points_by_rank", points_by_rank, "rank ")
    if not all(len(points) for points in lines.values()):
        raise ValueError(f"no points recorded for {[k for k, v in lines.items() if not len(v)]!r}")
    scale, unit = style.unit_for((p.bytes for points in lines.values() for p in points), unit)
    picture, (axes,) = style.picture("memory inside one step", 2.9)
    phases = [e for e in events if e.end is not None]
    end = max([p.time for points in lines.values() for p in points] + [e.end for e in phases]) * 1e3
    for at, (label, points) in enumerate(lines.items()):
        xs = np.array([p.time for p in points] + [end / 1e3]) * 1e3
        ys = np.array([p.bytes for p in points] + [points[-1].bytes]) / scale
        top = int(np.argmax(ys))
        colour = style.SERIES[at % 8]
        axes.step(xs, ys, where="post", label=f"{label}: peak {style.short(ys[top])} {unit}", color=colour,
                  ls=style.LINES[at % 8], lw=1.6, marker=style.MARKERS[at % 8], markevery=[top], ms=7,
                  mec="white", mew=0.8, clip_on=False)  # fmt: skip
    axes.margins(y=0.12)
    if all(p.bytes >= 0 for points in lines.values() for p in points):
        axes.set_ylim(bottom=0)
    for kind in ("forward", "backward", "optimizer"):
        if spans := [(e.start * 1e3, e.end * 1e3) for e in phases if e.kind == kind]:
            start, stop = min(s for s, _ in spans), max(e for _, e in spans)
            axes.axvspan(start, stop, color=style.RULE, alpha=0.35 if kind == "backward" else 0.0, lw=0)
            over: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.text((start + stop) / 2, 1.01, kind, fontsize=8, color=style.MUTED, **over)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms since the step began", fontsize=9, color=style.INK)
    axes.set_ylabel(f"{unit} above the start", fontsize=9, color=style.INK)
    axes.grid(axis="y", color=style.RULE, lw=0.7)
    style.key(picture, axes.get_legend_handles_labels()[0], columns=min(4, len(lines)))
    style.title(picture, title)
    return picture


def _labelled(name: str, values: Any, prefix: str) -> dict[str, Any]:
    if isinstance(values, Mapping):
        result = {str(label): value for label, value in values.items()}
    else:
        result = {f"{prefix}{at}": value for at, value in enumerate(values)}
    if not result:
        raise ValueError(f"{name} is empty; it needs at least one entry")
    return result


def parts(held: Any) -> tuple[float | None, float | None, float | None]:
    """(P, G, O) bytes of a Held, a mapping or a triple."""
    if isinstance(held, Mapping):
        p, g, o = (held[name] for name in PARTS)
    elif isinstance(held, Sequence):
        p, g, o = held
    else:
        p, g, o = (getattr(held, name) for name in PARTS)
    return p, g, o


def _points(name: str, value: Any) -> tuple[list[float], list[float]]:
    if isinstance(value, Mapping):
        xs, ys = list(value), list(value.values())
    elif isinstance(value, tuple) and len(value) == 2 and not np.isscalar(value[0]):
        xs, ys = list(value[0]), list(value[1])
    else:
        xs, ys = list(range(len(value))), list(value)
    if len(xs) != len(ys):
        raise ValueError(f"series {name!r} has {len(xs)} x values and {len(ys)} y values")
    return [float(v) for v in xs], [float(v) for v in ys]


def _log_or_zero(axes: Any, many: list[list[float]]) -> None:
    positive = [v for ys in many for v in ys if v > 0]
    if positive and any(v <= 0 for ys in many for v in ys):
        low = 10.0 ** np.floor(np.log10(min(positive)))
        axes.set_yscale("symlog", linthresh=low, linscale=0.6)
        axes.set_ylim(bottom=0)
    elif positive:
        axes.set_yscale("log")


def _bars_frame(axes: Any, labels: list[str], top: float, x: str, y: str) -> None:
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, max(len(labels) - 0.4, 2.6))
    axes.set_ylim(0, top * 1.16)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(x, fontsize=9, color=style.INK)
    axes.set_ylabel(y, fontsize=9, color=style.INK)
    axes.grid(axis="y", color=style.RULE, lw=0.7)
