"""Pictures: drawn from data alone, without pyplot, from any thread, without warnings."""

import io
import subprocess
import sys
import threading

import matplotlib.font_manager
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from d2l_utils import figure as style
from d2l_utils.events import Event, MemoryPoint
from d2l_utils.memory import Sizes
from d2l_utils.plots import (
    batch,
    boxes,
    bundle,
    curves,
    memory_bars,
    memory_curve,
    panels,
    png,
    samples,
    timeline,
)

MB = 10**6
EVENTS = [
    Event("forward", "blocks.0", 0, 0.0, 0.010),
    Event("backward", "blocks.0", 0, 0.010, 0.070),
    Event("collective", "all_reduce", 0, 0.020, 0.045),
    Event("collective", "all_reduce", 0, 0.040, 0.070),
    Event("wait", "all_reduce", 0, 0.050, 0.070),
    Event("optimizer", "AdamW", 0, 0.070, 0.080),
    Event("collective", "broadcast", 0, 0.075, None),
]
PANEL = {"plain": {"ddp": 4.5, "fsdp2": 2.25}, "bf16": {"ddp": 0.0, "fsdp2": 1.5}}
PICTURES = {
    "memory_bars": lambda: memory_bars([(4 * MB, 4 * MB, 8 * MB), (4 * MB, None, None)], title="bars"),
    "timeline": lambda: timeline([EVENTS], title="timeline"),
    "curves": lambda: curves({"a": [0, 1, 2], "b": {1: 2, 4: 3}}, title="curves", log="y"),
    "memory_curve": lambda: memory_curve([[MemoryPoint(0, 0), MemoryPoint(0.01, MB)]], events=EVENTS),
    "boxes": lambda: boxes([[1, 2], [3, 4]], [[4, 6], [4, 6]], operation="all_reduce"),
    "samples": lambda: samples([[0, 2, 1], [1, 0, 2]], total=4),
    "batch": lambda: batch(4, 8, 16),
    "panels": lambda: panels({"peak, MB": PANEL, "step, ms": PANEL}, title="panels"),
}


def texts_of(figure: Figure) -> list[Text]:
    """Every text that the figure shows."""
    png(figure)
    hidden = [axis for axes in figure.axes if not axes.axison for axis in (axes.xaxis, axes.yaxis)]
    unseen = {id(text) for axis in hidden for text in axis.findobj(Text)}
    found = figure.findobj(Text)
    return [t for t in found if t.get_text() and t.get_visible() and id(t) not in unseen]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in texts_of(figure)]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_figure_of_the_lesson_width_and_small(name):
    figure = PICTURES[name]()
    assert isinstance(figure, Figure)
    data = png(figure)
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    assert image.width == round(style.WIDTH * style.DPI)
    assert len(data) < 100_000
    assert png(PICTURES[name]()) == data, "the same data gives the same bytes"


@pytest.mark.parametrize("name", PICTURES)
def test_all_text_lies_inside_the_picture(name):
    figure = PICTURES[name]()
    for text in texts_of(figure):
        box = text.get_window_extent()
        if box.width:
            assert box.x0 >= 0, text
            assert box.x1 <= figure.bbox.width, text
            assert box.y0 >= 0, text
            assert box.y1 <= figure.bbox.height, text


def test_no_pyplot_and_no_torch():
    code = (
        "import sys; from d2l_utils.plots import curves, png; png(curves({'a': [1, 2]}));"
        "print([m for m in ('matplotlib.pyplot', 'torch', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_draw_at_once_and_get_the_same_pictures():
    expected = {name: png(make()) for name, make in PICTURES.items()}
    wrong: list[str] = []

    def draw() -> None:
        for name, make in PICTURES.items():
            try:
                if png(make()) != expected[name]:
                    wrong.append(name)
            except Exception as error:
                wrong.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_colours_differ_for_colour_blind_readers_and_in_grey():
    """P, G, O and the tints that stand beside each other differ in lightness or carry different hatches."""
    from d2l_utils.plots import PARTS

    assert len({hatch for _, _, hatch in PARTS.values()}) == 3
    assert len(set(style.HATCHES)) == len(style.TINTS) == 8
    assert len(set(map(str, style.LINES))) == len(set(style.MARKERS)) == len(set(style.SERIES)) == 8


def test_n07_no_cjk_font_no_warning():
    """Every character that the pictures use is in the font that matplotlib brings along."""
    from fontTools.ttLib import TTFont

    font = TTFont(matplotlib.font_manager.findfont("DejaVu Sans", fallback_to_default=False))
    known = set(font.getBestCmap())
    shown = {c for make in PICTURES.values() for text in words(make()) for c in text if c != "\n" and c != "$"}
    assert {c for c in shown if ord(c) not in known} == set()


def test_memory_bars_say_unit_sums_and_what_is_not_allocated():
    figure = memory_bars(
        {"1": Sizes(parameters=4 * MB, gradients=4 * MB, optimizer=8 * MB), "2": (4 * MB, None, None)},
        formula={"1": (4 * MB, 4 * MB, 8 * MB)},
        x="N",
    )
    texts = words(figure)
    assert {"16", "MB per rank", "G not yet", "O not yet", "not yet allocated", "formula"} <= set(texts)
    [axes] = figure.axes
    [diamonds] = [line for line in axes.lines if line.get_marker() == "D"]
    assert list(diamonds.get_ydata()) == [4, 8, 16]
    # What is not allocated has no filled height, and adds nothing to the sum.
    assert "4" in texts
    assert [p.get_height() for p in axes.patches if p.get_x() < 0.5 and p.get_facecolor()[3]] == [4, 4, 8]


@pytest.mark.parametrize(("unit", "text"), [("MiB", "MiB per rank"), (None, "MB per rank"), ("GB", "GB per rank")])
def test_units_are_said(unit, text):
    assert text in words(memory_bars([(2**20, 2**20, 2**21)], unit=unit))


def test_binary_and_decimal_units_differ():
    assert style.unit_for([], "MiB") == (2**20, "MiB")
    assert style.unit_for([24.67e6]) == (1e6, "MB")
    assert style.unit_for([999]) == (1, "B")
    with pytest.raises(ValueError, match=r"unit is 'mb'; allowed: B, kB, MB"):
        style.unit_for([1], "mb")


def test_z05_uneven_bars_keep_their_heights():
    [axes] = memory_bars([(MB, MB, 9 * MB), (MB, MB, MB)]).axes
    assert [p.get_height() for p in axes.patches] == [1, 1, 9, 1, 1, 1]


def test_timeline_splits_collectives_into_hidden_and_exposed():
    figure = timeline([EVENTS, [Event("forward", "blocks.0", 1, 0, 0.01)]])
    texts = words(figure)
    # all_reduce runs from 20 to 70 ms; backward lasts until 70, but waits from 50 on.
    assert "30.0 ms hidden\n20.0 ms exposed" in texts
    assert "no communication" in texts
    # The colours say the same: of 25 + 30 ms of boxes, the 20 ms in which the rank waited are exposed.
    from matplotlib.colors import to_hex

    widths: dict[str, float] = {}
    for parts in figure.axes[0].collections:
        if not len(parts.get_facecolor()):
            continue  # the frames around the collectives
        colour = to_hex(parts.get_facecolor()[0]).upper()
        widths[colour] = widths.get(colour, 0) + sum(path.get_extents().width for path in parts.get_paths())
    assert widths[style.VERMILION] == pytest.approx(20)
    assert widths["#E6B8D0"] == pytest.approx(35)
    assert "ms since the step began" in texts


@pytest.mark.parametrize(
    ("hidden", "said"), [(3e-3, "3.0 ms"), (49e-6, "49 µs"), (0.06e-3, "0.1 ms"), (1e-7, "under 1 µs"), (0, "0.0 ms")]
)
def test_timeline_says_microseconds_where_tenths_of_milliseconds_are_none(hidden, said):  # W6
    events = [Event("backward", "b", 0, 0, hidden), Event("collective", "all_reduce", 0, 0, hidden + 1e-3)]
    assert f"{said} hidden\n1.0 ms exposed" in words(timeline([events]))


def test_timeline_lanes_do_not_overlap():
    from d2l_utils.timeline import _lanes

    ended = [e for e in EVENTS if e.kind == "collective" and e.end is not None]
    assert [lane for _, lane in _lanes(ended)] == [0, 1]
    late = Event("collective", "all_reduce", 0, 0.050, 0.06)
    assert [lane for _, lane in _lanes([*ended, late])] == [0, 1, 0]


def test_timeline_says_how_many_ranks_it_left_out():
    rows = [[Event("forward", "b", rank, 0, 0.01)] for rank in range(6)]
    assert any("(2 more ranks not drawn)" in text for text in words(timeline(rows)))


def test_curves_keep_zero_on_a_logarithmic_axis():
    figure = curves({"drift": [0, 1e-3, 1e-1], "averaged": [0, 0, 0]}, log="y")
    [axes] = figure.axes
    png(figure)
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 1e-1
    pixel = axes.transData.transform
    heights = [pixel((0, y))[1] for y in (0, 1e-3, 1e-2, 1e-1)]
    assert np.all(np.diff(heights) > 5), "0, 0.001, 0.01 and 0.1 stand apart"


def test_memory_curve_marks_the_peak():
    points = [MemoryPoint(0, 0), MemoryPoint(0.010, 31 * MB), MemoryPoint(0.020, 2 * MB)]
    assert "rank 0: peak 31 MB" in words(memory_curve([points]))
    assert "MB above the start" in words(memory_curve([points]))


def test_panels_say_every_number_and_share_their_rows():
    figure = panels({"peak, MB": PANEL, "step, ms": PANEL})
    said = words(figure)
    assert [said.count(word) for word in ("peak, MB", "plain", "ddp", "4.5", "2.25", "0", "1.5")] == [
        1,
        1,
        1,
        2,
        2,
        2,
        2,
    ]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [4.5, 2.25, 0.0, 1.5]
    with pytest.raises(ValueError, match="same rows and series in every panel"):
        panels({"a": PANEL, "b": {"plain": {"ddp": 1.0}}})
    with pytest.raises(ValueError, match="measures has"):
        panels({})


def test_boxes_are_coloured_by_whose_data_they_hold():
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    figure = boxes([[10], [20]], [[10, 20], [30, None]])
    left, _, right = figure.axes
    colours = [to_hex(p.get_facecolor()) for p in left.patches if isinstance(p, Rectangle)]
    assert colours == [style.TINTS[0], style.TINTS[1]]
    colours = [to_hex(p.get_facecolor()) for p in right.patches]
    assert colours == [style.TINTS[0], style.TINTS[1], "#ffffff", "#ffffff"]
    assert [p.get_hatch() for p in right.patches][2:] == ["xxxx", ""]
    assert "combined" in words(figure)


def test_d05_samples_count_draws_repeats_and_what_was_never_drawn():
    figure = samples([[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]], total=10)
    assert "12 draws, 2 repeats" in words(figure)
    [axes] = figure.axes
    framed = [p for p in axes.patches if p.get_hatch()]
    assert [(p.get_x(), p.get_y()) for p in framed] == [(3, 1), (3, 0)], "the last of ranks 1 and 2"
    assert "5 draws, 2 repeats, 7 never" in words(samples([[0, 1, 2], [0, 1]], total=10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory_bars([]), "measured is empty"),
        (lambda: memory_bars({"a": (1, 1, 1)}, {"b": (1, 1, 1)}), r"formula has \['b'\]"),
        (lambda: timeline([[]]), "events_by_rank holds no finished events"),
        (lambda: curves({"a": ([1, 2], [1])}), "series 'a' has 2 x values and 1 y values"),
        (lambda: curves({"a": [1]}, log="z"), "log is 'z'"),
        (lambda: memory_curve([[]]), r"no points recorded for \['rank 0'\]"),
        (lambda: boxes([[1]], [[1], [2]]), "before has 1 ranks, after has 2"),
        (lambda: samples({}), "epochs is empty"),
    ],
)
def test_bad_input_names_itself(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_stored_text_is_the_same_whatever_was_measured():
    one, other = memory_bars([(1, 1, 1)]), memory_bars([(5, None, None)] * 3, title="other")
    assert bundle(one)["text/plain"] == bundle(other)["text/plain"] == "[figure: memory bars: P, G, O]"


def test_a_notebook_gets_one_png_and_the_stable_text(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    published = []
    shell.display_pub.publish = lambda data, metadata=None, **_: published.append(data)
    try:
        shell.display_formatter.format(curves({"a": [1, 2]}))
    finally:
        InteractiveShell.clear_instance()
    assert [sorted(data) for data in published] == [["image/png", "text/plain"]]


def test_several_figures_become_one_and_keep_their_words():
    one, other = curves({"a": [1, 2]}, title="one"), curves({"b": [1, 2]})
    sheet = style.together([one, other, one], columns=2, dpi=50)
    drawn = style.pixels(sheet)
    part = style.pixels(one, 50)
    assert drawn.shape == (2 * part.shape[0], 2 * part.shape[1], 3)
    assert (drawn[: part.shape[0], : part.shape[1]] == part).all()
    assert (drawn[part.shape[0] :, part.shape[1] :] == 255).all(), "an empty place is white"
    assert sheet.alt == "[figure: curves; curves; curves]"
    sheet.drawn = None
    assert (style.pixels(sheet) == drawn).all(), "matplotlib itself draws the same"
    assert style.png(sheet) and len(style.png(sheet, quick=True)) > 0
    with pytest.raises(ValueError, match="figures is empty"):
        style.together([])
