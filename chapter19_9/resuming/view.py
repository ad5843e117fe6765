"""What lies in a checkpoint's files, and losses before and after a stop, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chapter19_9.result import Result
from chapter19_9.resuming.checkpoint import check
from chapter19_9.resuming.named import MODEL, STATE, index_of
from d2l_utils import figure as style


@dataclass(frozen=True)
class Stored:
    """A box of a tensor in a file. rank: who wrote it; offset, size: the box in the whole tensor; bytes: of its numbers."""

    name: str
    rank: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    whole: tuple[int, ...]
    bytes: int


def contents(path: str | Path) -> list[Stored]:
    """All that a checkpoint says is in it, in the order of names and offsets. Reads the table of contents only."""
    metadata = check(path)
    found = []
    for index, info in (metadata.storage_data or {}).items():
        tensor: Any = metadata.state_dict_metadata[index.fqn]
        rank = int(info.relative_path.removeprefix("__").partition("_")[0])
        size = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == index.offset)
        count = prod(size) * tensor.properties.dtype.itemsize
        found.append(Stored(index.fqn, rank, tuple(index.offset), tuple(size), tuple(tensor.size), count))
    return sorted(found, key=lambda part: (part.name, part.offset))


def per_rank(path: str | Path, ranks: int) -> list[int]:
    """Bytes of weights and optimizer states that each rank wrote, without the optimizer's counters of steps."""
    found = [0] * ranks
    for part in contents(path):
        if part.name.startswith((MODEL, STATE)) and not part.name.endswith(".step"):
            found[part.rank] += part.bytes
    return found


def strips(paths: Mapping[str, str | Path], shapes: Mapping[str, Sequence[int]], *, title: str | None = None) -> Figure:
    """Some weights laid end to end, a strip for each checkpoint: by colour and hatch, who wrote what.

    paths: {label: checkpoint}. shapes: of the weights, by name, in the order in which they are to be laid.
    """
    at, end = {}, 0
    for name, shape in shapes.items():
        at[MODEL + name], end = end, end + prod(shape)
    picture, (axes,) = style.picture("who wrote which part of a block", 0.9 + 0.42 * len(paths))
    ranks: set[int] = set()
    for row, path in enumerate(paths.values()):
        for part in contents(path):
            if part.name not in at:
                continue
            start = at[part.name] + index_of(part.whole, part.offset)
            axes.barh(
                row, prod(part.size), 0.62, start, color=style.TINTS[part.rank % 8], hatch=style.HATCHES[part.rank % 8],
                ec=style.MUTED, lw=0.3,
            )  # fmt: skip
            ranks.add(part.rank)
        axes.vlines([*at.values(), end], row - 0.42, row + 0.42, color=style.INK, lw=0.9)
    axes.set_yticks(range(len(paths)), list(paths))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end)
    axes.set_xlabel("numbers of one block's weights, tensor after tensor", fontsize=9, color=style.INK)
    key = [
        Patch(fc=style.TINTS[r % 8], hatch=style.HATCHES[r % 8], ec=style.MUTED, label=f"rank {r}'s file")
        for r in sorted(ranks)
    ]
    style.key(picture, key)
    style.title(picture, title)
    return picture


def apart(one: Result, other: Result) -> float:
    """The largest difference of the losses, over the steps of ``one``, which may have begun later. ValueError when the
    two do not end with the same step."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses[one.first - other.first :], strict=True))


def lives(
    never: Sequence[float],
    others: Mapping[str, tuple[int, Sequence[float]]],
    *,
    saved: int,
    killed: int | None = None,
    title: str | None = None,
) -> Figure:
    """The loss of a training that never stopped, and of others that went on from a checkpoint.

    others: {label: (first step, losses)}. saved: steps behind the checkpoint; killed: steps done when a rank was killed.
    """
    picture, (axes,) = style.picture("loss with and without a stop", 2.9)
    axes.plot(range(len(never)), never, color=style.GREY, lw=5, solid_capstyle="round", label="never stopped")
    for at, (label, (first, losses)) in enumerate(others.items(), start=1):
        axes.plot(
            range(first, first + len(losses)), losses, color=style.SERIES[at % 8], ls=style.LINES[at % 8],
            marker=style.MARKERS[at % 8], ms=8 - 2 * at, lw=1.6, mec="white", mew=0.5, label=label,
        )  # fmt: skip
    edge = saved - 0.5
    axes.axvline(edge, color=style.INK, lw=1.2, ls="--")
    if killed is not None:
        axes.axvspan(edge, killed - 0.5, color=style.YELLOW, alpha=0.35, lw=0)
        axes.axvline(killed - 0.5, color=style.VERMILION, lw=2)
    over: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8}
    axes.text(edge, 1.01, "saved", color=style.INK, **over)
    if killed is not None:
        axes.text((edge + killed - 0.5) / 2, 0.03, "done twice", color=style.INK, **over)
        axes.text(killed - 0.5, 1.01, "a rank is killed", color=style.VERMILION, **over)
    axes.set_xlabel("step", fontsize=9, color=style.INK)
    axes.set_ylabel("loss, nats", fontsize=9, color=style.INK)
    axes.grid(axis="y", color=style.RULE, lw=0.7)
    style.key(picture, axes.get_legend_handles_labels()[0])
    style.title(picture, title)
    return picture
