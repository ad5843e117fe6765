"""The one visual style: palette, hatches, markers, units, and a Figure that needs no pyplot.

Figures are made with :class:`matplotlib.figure.Figure` itself, so they may be drawn from any thread (widget
callbacks do) and pyplot keeps no list of them.
"""

import base64
import io
import logging
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from d2l_utils.alt_text import alternative_text

# A font cache that has to be built anew is told on stderr, in the middle of a lesson.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

WIDTH = 7.0  # inches: a lesson's column
DPI = 160

INK, MUTED, RULE = "#1a1a1a", "#5a5a5a", "#d0d0d0"
# Okabe and Ito's colours, told apart by colour-blind readers; hatches and markers say the same in grey.
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILION, PURPLE, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#999999"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))
# Light enough for dark text on them; one per rank.
TINTS = ("#9ecae8", "#f6cf7f", "#8fd3bd", "#e6b8d0", "#f3a77a", "#f7f1a0", "#cfcfcf", "#b9b4e6")
HATCHES = ("", "///", "...", "\\\\\\", "xx", "--", "++", "||")

_FACTORS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


# matplotlib promises no thread safety, and two panels may draw at once.
_rendering = threading.Lock()


class Picture(Figure):
    """A matplotlib Figure that shows itself in a notebook as one PNG, with the same text on every machine.

    `alt` is what a notebook stores beside the picture: what kind of picture it is, never a measured value.
    `titles` are the titles of the pictures that it was put together of, if it was.
    """

    alt = "[figure]"
    titles: tuple[str, ...] = ()
    drawn: np.ndarray | None = None  # what is put together of pictures is drawn already

    def _ipython_display_(self) -> None:
        # Not _repr_png_: an inline backend that was told "svg" would add a second, larger copy.
        from IPython.display import display

        metadata = {"image/png": {"width": self._shown_width(), "alt": described(self)}}
        display(bundle(self), metadata=metadata, raw=True)

    def _shown_width(self) -> int:
        return round(self.get_figwidth() * 100)


def picture(text: str, height: float, rows: int = 1, columns: int = 1, **layout: Any) -> tuple[Picture, list[Axes]]:
    """A new figure of the lesson's width and `height` inches, with rows x columns axes in reading order."""
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, hspace=0.04)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    figure.alt = f"[figure: {text}]"
    axes = list(figure.subplots(rows, columns, squeeze=False, **layout).flat)
    for one in axes:
        plain(one)
    return figure, axes


def plain(axes: Axes) -> None:
    """Quiet frame, small text."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=8.5, length=3)
    axes.set_axisbelow(True)


def title(figure: Figure, words: str | None) -> None:
    """The finding, over the whole figure at the left; longer ones wrap instead of running off the page."""
    if words:
        import textwrap

        lines = "\n".join(textwrap.fill(line, 78) for line in words.splitlines())
        figure.suptitle(lines, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)


def key(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    """One legend, under the picture, where it never covers data."""
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=columns or min(len(handles), 5), fontsize=8.5,
            frameon=False, handlelength=2.0, handletextpad=0.5, columnspacing=1.3, labelcolor=INK,
        )  # fmt: skip


def note(axes: Axes, x: float, y: float, words: str, points: tuple[float, float] = (0, 0), **text: Any) -> None:
    """Words at data point (x, y), moved by `points` typographic points."""
    assert axes.figure is not None
    shift = ScaledTranslation(points[0] / 72, points[1] / 72, axes.figure.dpi_scale_trans)
    settings: dict[str, Any] = {"fontsize": 8, "color": INK, "ha": "center", "va": "center"} | text
    axes.text(x, y, words, transform=axes.transData + shift, **settings)


def unit_for(values: Iterable[float], unit: str | None = None) -> tuple[float, str]:
    """(bytes per unit, unit) to show these byte counts in; decimal units unless `unit` names a binary one.

    Raises ValueError for a unit that is not one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    if unit is None:
        largest = max(values, default=0)
        unit = next((u for u in ("TB", "GB", "MB", "kB") if largest >= _FACTORS[u]), "B")
    if unit not in _FACTORS:
        raise ValueError(f"unit is {unit!r}; allowed: {', '.join(_FACTORS)}")
    return float(_FACTORS[unit]), unit


def short(value: float) -> str:
    """A number of about three digits: 0, 0.034, 4.21, 24.7, 1234."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    words = f"{value:.{digits}f}"
    return words.rstrip("0").rstrip(".") if "." in words else words


def png(figure: Figure, dpi: float | None = None, quick: bool = False) -> bytes:
    """The figure as PNG bytes, at `dpi` dots an inch (default: the figure's own); safe from any thread.

    quick: a larger file in a tenth of the time, for a screen and not to be stored.
    """
    from PIL import Image

    image = Image.fromarray(pixels(figure, dpi))
    data = io.BytesIO()
    if quick:
        image.save(data, format="png", compress_level=1)
        return data.getvalue()
    # 256 colours are plenty for flat tints and a third of the bytes: notebooks are kept in git.
    image.quantize(256, dither=Image.Dither.NONE).save(data, format="png", optimize=True, dpi=(dpi or figure.dpi,) * 2)
    return data.getvalue()


def together(figures: Sequence[Figure], columns: int = 2, dpi: float = 110) -> Picture:
    """Several figures as one, drawn at ``dpi`` dots an inch: in rows of ``columns``, from left to right.

    Its words are theirs, one after the other. Raises ValueError when there are none.
    """
    if not figures:
        raise ValueError("figures is empty: it needs at least one")
    drawn = [pixels(figure, dpi) for figure in figures]
    rows = [drawn[at : at + columns] for at in range(0, len(drawn), columns)]
    wide = max(sum(one.shape[1] for one in row) for row in rows)
    strips = []
    for row in rows:
        strip = np.full((max(one.shape[0] for one in row), wide, 3), 255, np.uint8)
        at = 0
        for one in row:
            strip[: one.shape[0], at : at + one.shape[1]] = one
            at += one.shape[1]
        strips.append(strip)
    whole = np.concatenate(strips)
    sheet = Picture(figsize=(whole.shape[1] / dpi, whole.shape[0] / dpi), dpi=dpi, facecolor="white")
    FigureCanvasAgg(sheet)
    sheet.figimage(whole, origin="upper")
    sheet.drawn = whole
    sheet.titles = tuple(title for one in figures for title in _titles(one))
    sheet.alt = (
        f"[figure: {'; '.join(getattr(one, 'alt', '[figure]')[1:-1].removeprefix('figure: ') for one in figures)}]"
    )
    return sheet


def pixels(figure: Figure, dpi: float | None = None) -> np.ndarray:
    """The figure as (height, width, 3) bytes, at ``dpi`` dots an inch (default: its own); safe from any thread."""
    drawn: np.ndarray | None = getattr(figure, "drawn", None)
    if drawn is not None and dpi in (None, figure.dpi):
        return drawn
    canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    own = figure.dpi
    with _rendering:
        try:
            figure.dpi = dpi or own
            canvas.draw()
            return np.asarray(canvas.buffer_rgba())[..., :3].copy()
        finally:
            figure.dpi = own


def described(figure: Figure, words: str | None = None) -> str:
    """The picture's alternative text: `words`, or else what kind of picture it is, and then its titles."""
    return alternative_text(getattr(figure, "alt", "[figure]") if words is None else words, *_titles(figure))


def _titles(figure: Figure) -> tuple[str, ...]:
    return getattr(figure, "titles", ()) or (figure.get_suptitle(),)


def bundle(figure: Figure) -> dict[str, str]:
    """{"image/png": base64, "text/plain": stable words}: what a notebook stores for this figure."""
    return {
        "image/png": base64.b64encode(png(figure)).decode("ascii"),
        "text/plain": getattr(figure, "alt", "[figure]"),
    }
