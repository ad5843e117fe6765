"""Pictures made of boxes: what collectives move, which sample goes where, what a global batch is made of."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from d2l_utils import figure as style

_COMBINED = ("#ffffff", "xxxx")


def boxes(before: Sequence[Any], after: Sequence[Any], *, operation: str = "", title: str | None = None) -> Figure:
    """Each rank's boxes before and after a collective, coloured by the rank whose data they hold.

    Arguments:
        before: per rank the values it starts with (numbers or short texts), different on each rank.
        after: per rank the values it ends with; None for a value, or for the whole list, is an empty box.
            A value that no rank had before was combined from several.
    Raises:
        ValueError: before and after have different numbers of ranks.
    """
    if len(before) != len(after):
        raise ValueError(f"before has {len(before)} ranks, after has {len(after)}: they must agree")
    owner: dict[Any, int] = {}
    for rank, values in enumerate(before):
        for value in values or ():
            owner.setdefault(value, rank)
    world = len(before)
    picture, (left, middle, right) = style.picture(
        "boxes before and after a collective", 0.95 + 0.4 * world, columns=3, width_ratios=(1, 0.22, 1)
    )
    size = max(len(values or ()) for values in (*before, *after)) or 1
    combined = False
    for axes, rows, name in zip((left, right), (before, after), ("before", "after"), strict=True):
        for rank, values in enumerate(rows):
            y = world - 1 - rank
            for at, value in enumerate(values if values else [None] * size):
                colour, hatch = ("white", "")
                if value is not None and value in owner:
                    colour, hatch = style.TINTS[owner[value] % 8], style.HATCHES[owner[value] % 8]
                elif value is not None:
                    (colour, hatch), combined = _COMBINED, True
                _box(axes, at, y, value, colour, hatch)
            axes.text(-0.25, y + 0.4, f"rank {rank}", ha="right", va="center", fontsize=9)
        axes.set_xlim(-0.08, size)
        axes.set_ylim(-0.15, world)
        axes.set_title(name, fontsize=9.5, color=style.MUTED, loc="left")
        axes.set_axis_off()
    middle.set_axis_off()
    middle.set_xlim(0, 1)
    middle.set_ylim(-0.15, world)
    ends = ((0.05, world / 2 - 0.08), (0.95, world / 2 - 0.08))
    middle.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=18, color=style.INK, lw=1.8))
    middle.text(0.5, world / 2 + 0.08, operation.replace("_", "_\n"), ha="center", va="bottom", fontsize=9)
    handles: list[Any] = [
        Patch(
            fc=style.TINTS[r % 8],
            hatch=style.HATCHES[r % 8],
            ec=style.MUTED,
            lw=0.6,
            label=f"rank {r}'s data",
        )
        for r in range(world)
    ]
    if combined:
        handles.append(Patch(fc=_COMBINED[0], hatch=_COMBINED[1], ec=style.MUTED, lw=0.6, label="combined"))
    style.key(picture, handles, columns=5)
    style.title(picture, title or operation)
    return picture


def samples(epochs: Any, *, title: str | None = None, total: int | None = None, columns: int | None = None) -> Figure:
    """Which sample each rank draws, in order, over epochs; repeats are framed, missing ones counted.

    Arguments:
        epochs: {label: indices by rank}, or a sequence over epochs, or for one epoch the indices by rank.
        total: number of samples in the data set, to say how many were never drawn.
        columns: draw only the first so many draws of each rank.
    """
    if not isinstance(epochs, Mapping):
        flat = all(isinstance(index, int) for rank in epochs for index in rank)
        epochs = {"": epochs} if flat else {f"epoch {at}": ranks for at, ranks in enumerate(epochs)}
    if not epochs:
        raise ValueError("epochs is empty; it needs at least one epoch")
    world = max(len(ranks) for ranks in epochs.values())
    longest = max((len(indices) for ranks in epochs.values() for indices in ranks), default=1) or 1
    highest = max((index for ranks in epochs.values() for indices in ranks for index in indices), default=1) or 1
    shown = min(longest, columns or 16)
    beside = len(epochs) * shown <= 18
    shape = (1, len(epochs)) if beside else (len(epochs), 1)
    height = 0.55 + (0.55 + 0.28 * world) * shape[0]
    picture, panels = style.picture("which rank draws which sample", height, *shape)
    repeats = False
    for axes, (label, ranks) in zip(panels, epochs.items(), strict=True):
        seen: set[int] = set()
        again = 0
        # In the order of drawing, all ranks' first sample before their second: the padding is the repeat.
        repeated: set[tuple[int, int]] = set()
        for at in range(longest):
            for rank, indices in enumerate(ranks):
                if at < len(indices):
                    if indices[at] in seen:
                        repeated.add((rank, at))
                        again += 1
                    seen.add(indices[at])
        repeats = repeats or bool(repeated)
        for rank, indices in enumerate(ranks):
            y = world - 1 - rank
            for at, index in enumerate(indices[:shown]):
                twice = (rank, at) in repeated
                _box(
                    axes,
                    at,
                    y,
                    index,
                    _shade(index / highest),
                    "////" if twice else "",
                    bold=twice,
                    full=True,
                )
            if len(indices) > shown:
                axes.text(shown + 0.15, y + 0.4, "…", fontsize=9, va="center")
            if not indices:
                axes.text(0, y + 0.4, "no samples", fontsize=8, va="center", color=style.MUTED)
        drawn = sum(len(indices) for indices in ranks)
        never = "" if total is None or len(seen) == total else f", {total - len(seen)} never"
        axes.set_title(f"{label}\n" * bool(label) + f"{drawn} draws, {again} repeats{never}", fontsize=8.5, loc="left")
        axes.set_xlim(-0.08, shown + 0.5 * (longest > shown))
        axes.set_ylim(-0.15, world)
        axes.set_axis_off()
    for rank, axes in product(range(world), panels[:1] if beside else panels):
        axes.text(-0.25, world - 1 - rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=9)
    handle = Patch(fc="white", hatch="////", ec=style.INK, lw=1.2, label="drawn before in this epoch")
    style.key(picture, [handle] if repeats else [])
    style.title(picture, title)
    return picture


def batch(micro: int, ranks: int, accumulation: int, *, title: str | None = None) -> Figure:
    """A global batch: a column per rank, a row per backward pass, `micro` samples in each box."""
    columns, rows = min(ranks, 16), min(accumulation, 8)
    picture, (axes,) = style.picture("global batch", 0.8 + 0.28 * rows)
    for row in range(rows):
        for column in range(columns):
            _box(axes, column, rows - 1 - row, f"{micro}", style.TINTS[column % 8], "")
    more = f"  (first {columns} of {ranks})" if columns < ranks else ""
    axes.text(
        columns / 2,
        rows + 0.05,
        f"{ranks} rank{'s' * (ranks != 1)}{more}",
        ha="center",
        va="bottom",
        fontsize=9,
    )
    more = f"\n(first {rows})" if rows < accumulation else ""
    passes = f"{accumulation} backward\npass{'es' * (accumulation != 1)}{more}"
    axes.text(-0.2, rows / 2, passes, ha="right", va="center", fontsize=9)
    axes.set_xlim(-0.08, max(columns, 4))
    axes.set_ylim(-0.15, rows + 0.6)
    axes.set_axis_off()
    words = f"{micro} samples × {ranks} ranks × {accumulation} passes = {micro * ranks * accumulation} per update"
    style.title(picture, title or words)
    return picture


def _shade(share: float) -> tuple[float, float, float]:
    """Light yellow to blue by sample number, light enough for dark text: the same order looks the same."""
    low, high = (0.99, 0.96, 0.80), (0.42, 0.66, 0.86)
    return tuple(a + (b - a) * share for a, b in zip(low, high, strict=True))  # type: ignore[return-value]


def _box(
    axes: Axes,
    x: float,
    y: float,
    value: Any,
    colour: Any,
    hatch: str,
    bold: bool = False,
    full: bool = False,
) -> None:
    empty = value is None
    axes.add_patch(
        Rectangle(
            (x, y), 1.0 if full else 0.94, 0.84, fc=colour, hatch=hatch, lw=1.5 if bold else 0.7,
            ec=style.INK if bold else style.MUTED, ls=(0, (3, 2)) if empty else "-",
        )
    )  # fmt: skip
    if not empty:
        patch = {"boxstyle": "round,pad=0.12", "fc": colour if not hatch else "white", "ec": "none"}
        weight = "bold" if bold else "normal"
        middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5, "color": style.INK}
        axes.text(x + 0.47, y + 0.42, str(value), bbox=patch, fontweight=weight, **middle)
