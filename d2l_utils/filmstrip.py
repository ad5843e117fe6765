"""A few frames of a recorded step side by side: what a notebook shows where the player does not run."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from d2l_utils import figure as style

# {"title", "ranks": [names], "columns": [names], "notes": [what is in a column, or ""],
#  "whole": [[bytes of each kind], by column],
#  "kinds": [{"letter", "name", "states": {code: [label, "none" | "stale" | "part" | "whole" | "moving" | "gone"]}}],
#  "frames": [{"words", "on": [ranks], "ms": [by rank], "phase", "states": 4 codes a cell (one a kind, then F, B, O or .
#              for what is computed on it), cells by rank and then column, "held": [row of the table, by cell],
#              "flights": [[name, [columns], [ranks]]], "bytes": [by rank, or None]}],
#  "table": [[bytes of each kind]], "curves": [[[ms, bytes], ...] by rank]}
Film = Mapping[str, Any]

_ACROSS = 3  # grids in a line
_TITLE, _CAPTION, _CELL, _CURVE = 0.28, 0.4, 0.36, 0.88  # inches
_FACE = ("#9ecae8", "#f6cf7f", "#8fd3bd")
_KEYS = ("title", "ranks", "columns", "notes", "whole", "kinds", "frames", "table", "curves")


def check(film: Any) -> Film:
    """The film itself. Raises ValueError where something is missing in it."""
    if not isinstance(film, Mapping) or (missing := [key for key in _KEYS if key not in film]):
        raise ValueError(f"film is {type(film).__name__} without {missing if isinstance(film, Mapping) else _KEYS}")
    if not film["frames"]:
        raise ValueError("film has no frames")
    cells = len(film["ranks"]) * len(film["columns"])
    if wrong := [i for i, frame in enumerate(film["frames"]) if len(frame["states"]) != 4 * cells]:
        raise ValueError(f"film's frames {wrong} do not have {cells} cells")
    return film


def filmstrip(*films: Film, frames: Sequence[int] | None = None, ranks: int = 4) -> Figure:
    """Frames as small grids in reading order, and under them the memory curve with the frames' places.

    Arguments:
        frames: the numbers of the frames, of each film the same; default: ``chosen(film)``.
        ranks: draw at most so many rows of a grid; how many were left out is said.
    """
    films = tuple(check(film) for film in films)
    if not films:
        raise ValueError("films is empty; it needs at least one")
    picks = [list(frames) if frames is not None else chosen(film) for film in films]
    shown = [min(ranks, len(film["ranks"])) for film in films]
    lines = [-(-len(numbers) // _ACROSS) for numbers in picks]
    tall = sum(_TITLE + line * (_CAPTION + _CELL * count) + _CURVE for line, count in zip(lines, shown, strict=True))
    picture = style.Picture(figsize=(style.WIDTH, tall + 0.3), dpi=style.DPI, facecolor="white")
    picture.alt = "[figure: what each rank holds, frame by frame]"
    inch, top = 1 / picture.get_figheight(), 1.0
    for film, numbers, count, many in zip(films, picks, shown, lines, strict=True):
        name = film["title"]
        if (more := len(film["ranks"]) - count) > 0:
            name += f"  ({more} more ranks not drawn)"
        picture.text(0.012, top - 0.2 * inch, name, fontsize=10, fontweight="bold", color=style.INK)
        top -= _TITLE * inch
        for place, number in enumerate(numbers):
            line, column = divmod(place, _ACROSS)
            wide, high = 0.93 / _ACROSS, _CELL * count * inch
            bottom = top - (line + 1) * (_CAPTION * inch + high)
            axes = picture.add_axes((0.065 + wide * column, bottom, wide - 0.018, high))
            _grid(axes, film, number, count, names=column == 0)
            words = film["frames"][number]["words"].removeprefix("all ranks: ")
            words = words if words.startswith("the ") else words.removesuffix(" begins")
            caption, size = _fitting(f"{place + 1}  {words}", (wide - 0.018) * style.WIDTH * 72)
            picture.text(0.065 + wide * column, bottom + high + 0.17 * inch, caption, fontsize=size, color=style.INK)
        top -= many * (_CAPTION + _CELL * count) * inch
        _curve(picture.add_axes((0.065, top - 0.55 * inch, 0.917, 0.37 * inch)), film, numbers)
        top -= _CURVE * inch
    _key(picture, films[0])
    return picture


def chosen(film: Film) -> list[int]:
    """Six frames that tell the story: start, a block's forward, the last of forward, a block's backward, gradients
    on their way, end."""
    frames = film["frames"]
    last, middle = len(frames) - 1, len(film["columns"]) // 2
    forward, backward = ([i for i, f in enumerate(frames) if f["states"][4 * middle + 3] == code] for code in "FB")
    late = [i for i, frame in enumerate(frames) if "F" in frame["states"][3::4]]
    sent = [i for i, f in enumerate(frames) if any(f["states"][4 * c + 1] in _moving(film, 1) for c in _served(f))]
    sent = [i for i in sent if backward and i > backward[0]]
    return sorted({0, *forward[:1], *late[-1:], *backward[:1], *sent[:1], last})


def _fitting(words: str, points: float) -> tuple[str, float]:
    """The words and a font size in which they take so many points at most: smaller, then without the last ones."""
    for size in (7.5, 6.5):
        if _wide(words, size) <= points:
            return words, size
    shorter = (textwrap.shorten(words, most, placeholder=" …") for most in range(len(words), 0, -1))
    return next((short for short in shorter if _wide(short, 6.5) <= points), ""), 6.5


@cache
def _wide(words: str, size: float) -> float:
    return float(TextPath((0, 0), words, size=size).get_extents().width)


def _moving(film: Film, kind: int) -> set[str]:
    return {code for code, (_, shape) in film["kinds"][kind]["states"].items() if shape == "moving"}


def _served(frame: Mapping[str, Any]) -> list[int]:
    return [column for _, columns, _ in frame["flights"] for column in columns]


def _grid(axes: Any, film: Film, number: int, ranks: int, names: bool) -> None:
    frame, columns = film["frames"][number], len(film["columns"])
    for rank in range(ranks):
        for column in range(columns):
            at = rank * columns + column
            codes, held = frame["states"][4 * at : 4 * at + 4], film["table"][frame["held"][at]]
            x, y = column, ranks - 1 - rank
            busy = codes[3] in "FB"
            axes.add_patch(
                Rectangle((x + 0.04, y + 0.05), 0.92, 0.9, fc="none", ec=style.INK if busy else style.RULE,
                          lw=1.3 if busy else 0.6)
            )  # fmt: skip
            for k, kind in enumerate(film["kinds"]):
                shape = kind["states"][codes[k]][1]
                share = min(1.0, held[k] / film["whole"][column][k]) if film["whole"][column][k] else 0.0
                offset = _offset(film, k, rank, column) if shape in ("part", "gone") else 0.0
                _bar(axes, x + 0.09, y + 0.67 - 0.28 * k, 0.82, 0.22, k, shape, share, offset)
                axes.text(x + 0.11, y + 0.77 - 0.28 * k, kind["letter"], fontsize=5, va="center", color=style.INK)
    for column, name in enumerate(film["columns"]):
        words = name.rpartition(" ")[2]
        served = column in _served(frame)
        axes.text(column + 0.5, ranks + 0.02, words, fontsize=6.5, ha="center", va="bottom",
                  color=style.VERMILION if served else style.MUTED,
                  fontweight="bold" if served else "normal")  # fmt: skip
    for rank in range(ranks) if names else ():
        axes.text(-0.06, ranks - rank - 0.5, film["ranks"][rank], fontsize=6, ha="right", va="center")
    axes.set_xlim(0, columns)
    axes.set_ylim(0, ranks)
    axes.axis("off")


def _offset(film: Film, kind: int, rank: int, column: int) -> float:
    """Where a rank's part is drawn: after the parts of the ranks before it, if together they make one whole."""
    held = film["frames"][-1 if kind else 0]["held"]
    parts = [film["table"][held[r * len(film["columns"]) + column]][kind] for r in range(len(film["ranks"]))]
    whole = film["whole"][column][kind] or 1
    return min(1 - parts[rank] / whole, sum(parts[:rank]) / whole) if 0.9 < sum(parts) / whole < 1.2 else 0.0


def _bar(
    axes: Any, x: float, y: float, wide: float, high: float, kind: int, shape: str, share: float, offset: float = 0.0
) -> None:
    face, line = _FACE[kind], {"moving": "-", "gone": (0, (2, 1.5)), "none": (0, (1, 2))}.get(shape, "-")
    edge = style.VERMILION if shape == "moving" else style.MUTED
    filled = {"none": 0.0, "moving": 1.0, "whole": 1.0}.get(shape, share)
    hatch = {"moving": "/////", "stale": "....."}.get(shape, "")
    if filled:
        colours: dict[str, Any] = {
            "fc": "white" if shape == "stale" else face,
            "ec": "white" if shape == "moving" else style.GREY,
        }
        axes.add_patch(Rectangle((x + wide * offset, y), wide * filled, high, hatch=hatch, lw=0, **colours))
    axes.add_patch(Rectangle((x, y), wide, high, fc="none", ec=edge, ls=line, lw=0.6))


def _curve(axes: Any, film: Film, numbers: Sequence[int]) -> None:
    style.plain(axes)
    curves = [curve for curve in film["curves"] if curve]
    if not curves:
        axes.text(0, 0, "no memory curve was recorded", fontsize=7)
        axes.axis("off")
        return
    scale, unit = style.unit_for(point[1] for curve in curves for point in curve)
    curve = film["curves"][0]
    end = film["frames"][-1]["ms"][0]
    xs, ys = [*(point[0] for point in curve), end], [point[1] / scale for point in (*curve, curve[-1])]
    axes.step(xs, ys, where="post", color=style.INK, lw=1)
    axes.fill_between(xs, ys, step="post", color="#e8eef3", lw=0)
    for place, number in enumerate(numbers):
        at = min(film["frames"][number]["ms"][0], end)
        axes.axvline(at, color=style.VERMILION, lw=1)
        axes.text(at, 1.02, str(place + 1), transform=axes.get_xaxis_transform(), fontsize=6.5, ha="center")
    top = max(ys)
    axes.set_xlim(xs[0], end)
    axes.set_ylim(0, top * 1.05)
    axes.set_yticks([0, top], ["0", style.short(top)])
    axes.tick_params(labelsize=6.5)
    axes.set_ylabel(unit, fontsize=6.5, labelpad=1)
    words = f"tensor memory of {film['ranks'][0]}, over milliseconds"
    axes.text(0.5, 0.12, words, transform=axes.transAxes, fontsize=6.5, ha="center", color=style.MUTED)  # fmt: skip


def _key(picture: Any, film: Film) -> None:
    high = 0.2 / picture.get_figheight()
    axes = picture.add_axes((0.012, 0.005, 0.98, high))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1)
    axes.axis("off")
    entries = [(k, "whole", 1.0, f"{kind['letter']}  {kind['name']}") for k, kind in enumerate(film["kinds"])]
    entries += [
        (0, "part", 0.3, "a part"),
        (0, "moving", 1.0, "on its way"),
        (0, "gone", 0.3, "freed"),
        (0, "stale", 1.0, "old"),
        (0, "none", 0.0, "none"),
    ]
    x = 0.0
    for k, shape, share, words in entries:
        _bar(axes, x, 0.25, 3, 0.5, k, shape, share)
        axes.text(x + 3.6, 0.5, words, fontsize=6.5, va="center", color=style.INK)
        x += 4.6 + 0.7 * len(words)
    axes.text(x, 0.5, "framed: computes", fontsize=6.5, va="center", color=style.INK)
