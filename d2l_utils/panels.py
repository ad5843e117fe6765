"""Several measures of the same few things side by side: a panel a measure, a row a thing, a bar a series."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from d2l_utils import figure as style

Measures = Mapping[str, Mapping[str, Mapping[str, float]]]


def panels(measures: Measures, *, title: str | None = None) -> Figure:
    """Horizontal bars with their numbers at the ends; the panels share their rows, each has its own unit.

    measures: {what, with its unit: {row: {series: value}}}, the same rows and series in each. Raises ValueError when
    there are none, or they differ.
    """
    shapes = {name: [(row, tuple(values)) for row, values in rows.items()] for name, rows in measures.items()}
    if not measures or len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"measures has {shapes}: it must have the same rows and series in every panel")
    rows = list(next(iter(measures.values())))
    series = list(next(iter(next(iter(measures.values())).values())))
    picture, many = style.picture("panels", 0.7 + 0.21 * len(rows) * (len(series) + 0.8), 1, len(measures), sharey=True)
    height = 0.8 / len(series)
    for axes, (name, values) in zip(many, measures.items(), strict=True):
        top = max(value for row in values.values() for value in row.values()) or 1.0
        for at, row in enumerate(rows):
            for number, one in enumerate(series):
                y = at + (number - (len(series) - 1) / 2) * height
                look: Any = {"color": style.SERIES[number % 8], "hatch": style.HATCHES[number % 8], "ec": "white"}
                axes.barh(y, values[row][one], height, lw=0.6, **look)
                style.note(axes, values[row][one], y, style.short(values[row][one]), (3, 0), ha="left", fontsize=7.5)
        axes.set_xlim(0, 1.35 * top)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(name, fontsize=9, loc="left", color=style.INK)
    many[0].set_yticks(range(len(rows)), rows)
    many[0].invert_yaxis()
    looks = [(style.SERIES[at % 8], style.HATCHES[at % 8], one) for at, one in enumerate(series)]
    style.key(picture, [Patch(fc=colour, hatch=hatch, ec="white", label=one) for colour, hatch, one in looks])
    style.title(picture, title)
    return picture
