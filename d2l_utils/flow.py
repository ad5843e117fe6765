"""A flow of questions, drawn: boxes in lanes, the path that was taken in bold."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from d2l_utils import figure as style


@dataclass(frozen=True)
class Box:
    """One question. words: at most three short lines; state: "no" (passed through), "yes" (where the path ends) or ""
    (never asked)."""

    words: str
    state: str = ""


def flow(lanes: Sequence[tuple[str, Sequence[Box]]], start: str, end: Box, *, title: str | None = None) -> Figure:
    """Lanes of questions, one under another; a path goes through each from left to right, then to the next.

    lanes: (name, boxes). start: words before the first box. end: where the path goes when no box says "yes".
    Raises ValueError for a state that does not exist, and for no lanes.
    """
    if not lanes or not all(boxes for _, boxes in lanes):
        raise ValueError("lanes is empty; it needs at least one lane with a box")
    for box in (*(box for _, boxes in lanes for box in boxes), end):
        if box.state not in ("no", "yes", ""):
            raise ValueError(f"state is {box.state!r}; allowed: 'no', 'yes', ''")
    columns = max(len(boxes) for _, boxes in lanes)
    picture, (axes,) = style.picture("flow of questions, the path taken in bold", 0.7 + 0.98 * (len(lanes) + 0.74))
    axes.set_axis_off()
    axes.set_xlim(-0.62, max(columns, 3) - 0.38)
    axes.set_ylim(-len(lanes) - 0.34, 0.68)
    style.note(axes, -0.46, 0.58, start, ha="left", fontsize=8.5, fontweight="bold")
    for row, (name, boxes) in enumerate(lanes):
        style.note(axes, 0.08 if row else -0.46, -row + 0.4, name, ha="left", color=style.MUTED)
        for column, box in enumerate(boxes):
            _draw(axes, column, -row, box)
            went = box.state == "no"
            if column + 1 < len(boxes):
                _arrow(axes, (column + 0.41, -row), (column + 0.59, -row), went)
            else:
                _turn(axes, (column, -row - 0.28), (0.0, -row - 0.72), went)
    _draw(axes, 0.0, -len(lanes), end, wide=2.4, sign=False)
    style.title(picture, title)
    return picture


def _draw(axes: Axes, x: float, y: float, box: Box, wide: float = 0.82, sign: bool = True) -> None:
    left = x - 0.41
    taken = box.state != ""
    fill = {"yes": style.TINTS[2], "no": "white", "": "white"}[box.state]
    shape = FancyBboxPatch(
        (left, y - 0.28), wide, 0.56, boxstyle="round,pad=0,rounding_size=0.08", fc=fill,
        ec=style.INK if taken else style.GREY, lw=2.4 if box.state == "yes" else 1.5 if taken else 0.9,
        ls="-" if taken else (0, (3, 2)),
    )  # fmt: skip
    axes.add_patch(shape)
    before = {"yes": "✓ ", "no": "✗ ", "": ""}[box.state] if sign else ""
    style.note(
        axes, left + wide / 2, y, before + box.words, fontsize=8.2, linespacing=1.25,
        color=style.INK if taken else style.MUTED, fontweight="bold" if box.state == "yes" else "normal",
    )  # fmt: skip


def _look(went: bool) -> dict:
    return {
        "arrowstyle": "-|>", "color": style.INK if went else style.GREY, "lw": 2.2 if went else 0.9,
        "shrinkA": 0, "shrinkB": 0, "linestyle": "-" if went else (0, (3, 2)), "mutation_scale": 11 if went else 8,
    }  # fmt: skip


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], went: bool) -> None:
    axes.annotate("", end, begin, arrowprops=_look(went))


def _turn(axes: Axes, begin: tuple[float, float], end: tuple[float, float], went: bool) -> None:
    """From under one lane's last box to above the next lane's first."""
    middle = (begin[1] + end[1]) / 2 + 0.04
    look = _look(went)
    line = {"color": look["color"], "lw": look["lw"], "ls": look["linestyle"], "solid_capstyle": "butt"}
    axes.plot([begin[0], begin[0], end[0]], [begin[1], middle, middle], **line)
    axes.annotate("", end, (end[0], middle), arrowprops=look)
