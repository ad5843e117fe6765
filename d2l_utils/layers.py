"""Parts of a whole through the stages of something, laid upon one another."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from d2l_utils import figure as style


def layers(
    columns: Mapping[str, Sequence[float]],
    parts: Mapping[str, tuple[str, str, str]],
    *,
    phases: Sequence[tuple[str, int]] = (),
    marked: tuple[int, str] | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> Figure:
    """Steps of stacked bytes: one column a stage, in order; no time between them.

    Arguments:
        columns: {part: bytes at each stage}, all of the same length.
        parts: {part: (name, colour, hatch)}, from the lowest layer up; parts without bytes are left out.
        phases: (name, number of stages) from left to right, named over the picture.
        marked: a stage, and the words to put beside its top.
        unit: "MB", "GB", "GiB", ... (default: the decimal unit that fits).
    Raises ValueError for no columns, columns of unequal length, or an unknown part or unit.
    """
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1 or not min(lengths):
        raise ValueError(f"columns has {sorted(lengths)} stages: all must have the same number, at least 1")
    if unknown := sorted(set(columns) - set(parts)):
        raise ValueError(f"columns has part {unknown[0]!r}; allowed: {', '.join(parts)}")
    stages = lengths.pop()
    total = np.sum([np.asarray(column, float) for column in columns.values()], axis=0)
    scale, unit = style.unit_for([float(total.max())], unit)
    picture, (axes,) = style.picture("layers", 3.0)
    edges, base = np.arange(stages + 1), np.zeros(stages + 1)
    handles: list[Any] = []
    for part, (name, colour, hatch) in parts.items():
        column = np.asarray(columns.get(part, [0.0] * stages), float) / scale
        if not column.any():
            continue
        top = base + np.append(column, column[-1])
        axes.fill_between(edges, base, top, step="post", fc=colour, hatch=hatch, ec="white", lw=0)
        handles.append(Patch(fc=colour, hatch=hatch, ec="white", label=name))
        base = top
    axes.stairs(total / scale, edges, color=style.INK, lw=1.0, baseline=None)
    at = 0
    for name, length in phases:
        over: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axes.text(min(at + length / 2, 0.965 * stages), 1.01, name, fontsize=8, color=style.MUTED, **over)
        at += length
        if at < stages:
            axes.axvline(at, color=style.INK, lw=0.8, ls=(0, (2, 2)))
    axes.set_xlim(0, stages)
    axes.set_ylim(0, 1.12 * total.max() / scale)
    if marked is not None:
        place, words = marked
        height = total[place] / scale
        axes.plot(place + 0.5, height, "v", ms=8, mfc=style.VERMILION, mec="white", mew=0.8, clip_on=False)
        right = place > stages / 2
        box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
        style.note(
            axes, place + 0.5, height, f"{style.short(height)} {unit}, {words}", (-7 if right else 7, 6),
            ha="right" if right else "left", fontweight="bold", bbox=box,
        )  # fmt: skip
    axes.set_xticks([])
    axes.set_ylabel(f"{unit} on one rank", fontsize=9, color=style.INK)
    axes.grid(axis="y", color=style.RULE, lw=0.7)
    style.key(picture, handles, columns=6)
    style.title(picture, title)
    return picture
