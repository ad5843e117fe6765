"""Efficiency over the number of ranks: a panel for each thing that stays, a line for each way to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from chapter19_9.choosing.scaling import Step
from d2l_utils import figure as style

TICKS = (8, 100, 1_000, 10_000, 100_000)


def efficiency(panels: Mapping[str, Mapping[str, Sequence[Step]]], *, title: str | None = None) -> Figure:
    """{what stays: {way: its steps}}, the same ways in each panel. A line whose batch has one sample left for each rank
    ends there, with a bar. Raises ValueError when there is nothing to draw."""
    if not panels or not all(steps for ways in panels.values() for steps in ways.values()):
        raise ValueError(f"panels is {panels!r}: it must have at least one panel, and a step for each way")
    picture, many = style.picture("efficiency over ranks", 3.1, 1, len(panels), sharey=True, sharex=True)
    for axes, (name, ways) in zip(many, panels.items(), strict=True):
        for at, (way, steps) in enumerate(ways.items()):
            xs, ys = [step.setup.ranks for step in steps], [100 * step.efficiency for step in steps]
            axes.plot(
                xs, ys, label=way, color=style.SERIES[at % 8], ls=style.LINES[at % 8], marker=style.MARKERS[at % 8],
                lw=max(1.4, 2.6 - 0.4 * at), ms=4, mec="white", mew=0.5, clip_on=False,
            )  # fmt: skip
        if ends := [
            step.setup.ranks for steps in ways.values() for step in steps if step.setup.batch == step.setup.ranks
        ]:
            axes.axvline(ends[0], color=style.MUTED, lw=1.0)
            over = {"ha": "left", "color": style.MUTED}
            style.note(axes, ends[0], 50, "one sample\na rank: no\nmore ranks", (5, 0), **over)
        axes.set_title(name, fontsize=9, loc="left", color=style.INK)
        axes.set_xscale("log", base=2)
        axes.set_xlim(8, 1e5)
        axes.set_ylim(0, 105)
        axes.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks", fontsize=9, color=style.INK)
        axes.grid(axis="y", color=style.RULE, lw=0.7)
    many[0].set_ylabel("% of a step spent computing", fontsize=9, color=style.INK)
    style.key(picture, many[0].get_legend_handles_labels()[0])
    style.title(picture, title)
    return picture
