"""Every picture has an alternative text: sentences that can be read out, wherever the picture is shown or stored (X44)."""

import pytest

from d2l_utils import figure as style
from d2l_utils.alt_text import alternative_text, is_sentence
from d2l_utils.plots import curves
from d2l_utils.widgets import BatchPanel, MemorySlider, parts


@pytest.mark.parametrize(
    ("words", "titles", "told"),
    [
        ("[figure: curves]", (), "Figure: curves."),
        ("[figure: curves]", ("the loss\nfalls", ""), "Figure: curves. The loss falls."),
        ("[drift; knobs: average]\n[figure: curves]", (), "Drift; knobs: average. Figure: curves."),
        ("what fits:\nZeRO-1!\n\ncode = 1", ("Why?",), "What fits: ZeRO-1! Why?"),
        ("", (), ""),
    ],
)
def test_the_alternative_text_is_the_shown_text_as_sentences(words, titles, told):
    assert alternative_text(words, *titles) == told
    assert is_sentence(told) is bool(told)


@pytest.mark.parametrize(
    "text", [None, "", "...", "Figure: curves", "<Figure size 640x480 with 1 Axes>.", "A <matplotlib.Axes object>."]
)
def test_a_name_of_an_object_is_no_alternative_text(text):
    assert not is_sentence(text)


def shown(figure):
    """The metadata with which a notebook displays a figure."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    published = []
    shell.display_pub.publish = lambda data, metadata=None, **_: published.append(metadata)
    try:
        shell.display_formatter.format(figure)
    finally:
        InteractiveShell.clear_instance()
    return published[0]


def test_a_displayed_figure_says_its_kind_and_its_title():
    told = shown(curves({"a": [1, 2]}, title="the loss falls"))["image/png"]
    assert told == {"width": 700, "alt": "Figure: curves. The loss falls."}


def test_figures_put_together_say_all_their_titles():
    sheet = style.together([curves({"a": [1, 2]}, title="one"), curves({"a": [1, 2]}, title="two")])
    assert style.described(sheet) == "Figure: curves; curves. One. Two."


def test_a_live_panels_image_says_the_same():
    assert 'alt="Figure: curves. A &lt; b."' in parts.image(curves({"a": [1, 2]}, title="a < b"))


@pytest.mark.parametrize(
    ("make", "begin"),
    [
        (BatchPanel, "Batch-size panel. 4 samples × 8 ranks × 16 passes = 512."),
        (
            lambda: MemorySlider({"n": [1]}, lambda n: {"one": (1, 1, 1)}, title="states"),
            "States; knobs: n. N 1: one 3 B.",
        ),
    ],
)
def test_what_stands_in_for_a_widget_has_its_words(make, begin):
    data, metadata = make()._repr_mimebundle_()
    assert "image/png" in data
    assert metadata["image/png"]["alt"].startswith(begin)
    assert is_sentence(metadata["image/png"]["alt"])
