"""A table as a picture: each cell with what was expected under it, and how far apart they are, in colour and in a sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from d2l_utils import figure as style

__all__ = ["Cell", "grid", "judged"]

# How a cell is marked: colour, sign, and what the key says. Colour is never the only sign.
MARKS = {
    "exact": ("#bfe3d5", "=", "= equal to the formula"),
    "close": ("#d6eaf7", "≈", "≈ within 5 %"),
    "off": ("#f3b48a", "≠", "≠ more than 5 % apart"),
    "measured": ("white", "", "measured, no formula"),
}


@dataclass(frozen=True)
class Cell:
    """text: what was measured. beside: what was expected, "" where nothing is. mark: one of ``MARKS``."""

    text: str
    beside: str = ""
    mark: str = "measured"

    def __post_init__(self) -> None:
        if self.mark not in MARKS:
            raise ValueError(f"mark is {self.mark!r}: it must be one of {', '.join(MARKS)}")


def judged(measured: float, expected: float | None, write: Any = style.short) -> Cell:
    """A cell of two numbers, marked by how far they are apart, relative to what was expected."""
    if expected is None:
        return Cell(write(measured))
    if math.isclose(measured, expected, rel_tol=1e-12):
        return Cell(write(measured), write(expected), "exact")
    apart = abs(measured - expected) / expected if expected else math.inf
    return Cell(write(measured), write(expected), "close" if apart <= 0.05 else "off")


def grid(
    rows: Mapping[str, Sequence[Cell]],
    columns: Sequence[str],
    *,
    title: str | None = None,
    note: str = "",
    groups: Mapping[str, int] | None = None,
    width: float = 9.6,
) -> Figure:
    """One row of cells for each label.

    groups: {heading: how many columns it stands over}, from left to right. note: a line under the table, for units and
    abbreviations. width: inches. Raises ValueError for
    a row that has not one cell for each column.
    """
    for label, cells in rows.items():
        if len(cells) != len(columns):
            raise ValueError(f"rows[{label!r}] has {len(cells)} cells; there are {len(columns)} columns")
    tall = len(rows)
    picture, (axes,) = style.picture("table: measured, and the formula under it", 1.5 + 0.36 * tall)
    picture.set_figwidth(width)
    left = 2.1  # columns' widths that the labels take
    for at, (label, cells) in enumerate(rows.items()):
        y = tall - at - 1
        axes.text(-0.12, y + 0.5, label, fontsize=8, ha="right", va="center", color=style.INK)
        for x, cell in enumerate(cells):
            colour, sign, _ = MARKS[cell.mark]
            axes.add_patch(Rectangle((x, y), 1, 1, fc=colour, ec="white", lw=1.5))
            both = bool(cell.beside)
            axes.text(x + 0.5, y + (0.66 if both else 0.5), cell.text, fontsize=7.5, ha="center", va="center")
            if both:
                words = f"{sign} {cell.beside}"
                axes.text(x + 0.5, y + 0.27, words, fontsize=6, ha="center", va="center", color=style.MUTED)
    for x, name in enumerate(columns):
        axes.text(x + 0.5, tall + 0.12, name, fontsize=7.5, ha="center", va="bottom", linespacing=1.1)
    x = 0
    for heading, span in (groups or {}).items():
        if heading:
            axes.plot([x + 0.06, x + span - 0.06], [tall + 1.02] * 2, color=style.MUTED, lw=0.8)
            axes.text(x + span / 2, tall + 1.1, heading, fontsize=8, ha="center", va="bottom", fontweight="bold")
        x += span
    axes.set_xlim(-left, len(columns))
    axes.text(-left, -0.35, note, fontsize=7.5, va="center", color=style.MUTED)
    axes.set_ylim(-0.5 if note else 0, tall + (1.9 if groups else 1.1))
    axes.axis("off")
    used = {cell.mark for cells in rows.values() for cell in cells}
    style.key(
        picture, [Patch(fc=c, ec=style.RULE, label=words) for mark, (c, _, words) in MARKS.items() if mark in used]
    )
    style.title(picture, title)
    return picture
