"""The form panel and the advisor in it: answered at once, an error beside its field, stable text; pictures of flow and bars."""

from dataclasses import replace

import pytest

from chapter19_9.choosing.advisor import Question
from chapter19_9.choosing.panel import OWN, AdvisorPanel
from chapter19_9.choosing.presets import PRESETS, own
from d2l_utils.alt_text import is_sentence
from d2l_utils.figure import png
from d2l_utils.flow import Box, flow
from d2l_utils.plots import curves
from d2l_utils.stacks import stacks
from d2l_utils.widgets import FormPanel

PARTS = {"a": ("first", "#000000", ""), "b": ("second", "#999999", "///")}


def form(least):
    """A panel of two numbers, from ``least`` and 1, and what it was asked."""
    calls = []

    def answer(number, other):
        calls.append((number, other))
        if number < 0:
            raise ValueError(f"number is {number}: it must be at least 0")
        if other == 13:
            raise ValueError("this is <no> field's fault")
        return number * other

    panel = FormPanel(
        answer, lambda result: [curves({"x": [result, 1]})], {"number": range(least, 10), "other": range(1, 20)},
        title="form", describe=lambda result: f"product {result}",
    )  # fmt: skip
    return panel, calls


def test_a_change_is_answered_at_once_and_an_error_stands_beside_its_field():
    with pytest.raises(ValueError, match="number is -5"):
        form(-5)
    panel, calls = form(0)
    panel.fields["number"].min = -5
    panel.fields["number"].value = 3
    assert (panel.result, calls[-1]) == (3, (3, 1))
    assert "product 3" in panel.words.value and panel.text() == "[form; fields: number, other]\nproduct 3"
    panel.fields["number"].value = -2
    assert "number is -2" in panel.errors["number"].value and 'role="alert"' in panel.errors["number"].value
    assert not panel.errors["other"].value and not panel.status.value
    assert "opacity" in panel.pictures.value and panel.result == 3
    panel.fields["number"].value = 2
    assert not panel.errors["number"].value and "opacity" not in panel.pictures.value
    panel.fields["other"].value = 13
    assert "this is &lt;no&gt; field&#x27;s fault" in panel.status.value
    before = len(calls)
    with panel.together():
        panel.fields["number"].value, panel.fields["other"].value = 4, 5
    assert (panel.result, len(calls)) == (20, before + 1)
    stored, metadata = panel._repr_mimebundle_()
    assert is_sentence(metadata["image/png"]["alt"])
    assert stored["text/plain"] == panel.text() and stored["image/png"]


def test_a_preset_fills_in_its_sizes_and_own_sizes_are_free():
    panel = AdvisorPanel(model="llama-7b")
    assert all(panel.fields[name].disabled for name in ("layers", "width", "heads", "vocabulary"))
    panel.fields["model"].value = "gpt3-175b"
    model = PRESETS["gpt3-175b"]
    assert {name: panel.fields[name].value for name in ("layers", "width", "heads", "vocabulary", "length")} == {
        "layers": model.layers, "width": model.width, "heads": model.heads,
        "vocabulary": model.vocabulary, "length": model.length,
    }  # fmt: skip
    assert panel.result.question.sizes is model and panel.result.chosen is None
    assert "Nothing fits" in panel.words.value
    panel.fields["model"].value = OWN
    assert not panel.fields["layers"].disabled
    panel.fields["layers"].value = 2
    assert panel.result.question.sizes.layers == 2
    for field, wrong in (("heads", 7), ("memory", -1.0), ("nodes", 0), ("length", -1), ("micro_batch", 0)):
        right = panel.fields[field].value
        panel.fields[field].value = wrong
        assert f"{field} is {wrong}" in panel.errors[field].value, panel.error
        panel.fields[field].value = right
        assert panel.error is None
    panel.fields["checkpointing"].value = True
    assert {option.checkpointing for option in panel.result.options} == {True}


def test_what_has_no_field_is_not_lost():
    """A model of a shape that the fields cannot give, and what they do not ask for."""
    llama = replace(PRESETS["llama3-8b"], layers=8)
    panel = AdvisorPanel(model=llama, teraflops=10.0, reserve=0.3)
    assert panel.result.question == Question(model=llama, length=8192, teraflops=10.0, reserve=0.3)
    panel.fields["nodes"].value = 2
    assert panel.result.question == Question(model=llama, length=8192, teraflops=10.0, reserve=0.3, nodes=2)
    panel.fields["model"].value = "gpt2"
    assert panel.result.question.sizes == PRESETS["gpt2"] and panel.fields["layers"].value == 12
    panel.fields["model"].value = "llama3-8b*"
    assert panel.result.question.sizes == llama and panel.fields["layers"].value == 8
    assert AdvisorPanel(model=PRESETS["llama3-8b"]).fields["model"].value == "llama3-8b"
    assert AdvisorPanel(model=own(layers=2, width=8, heads=2, vocabulary=9, length=4)).fields["model"].value == OWN


def test_what_was_just_run_stays_under_every_answer():
    toy = stacks({"toy": {"a": 1e6}}, PARTS, dots={"toy": 1.1e6})
    panel = AdvisorPanel(model="llama-7b", toy=toy)
    assert panel.figures[-1] is toy and len(panel.figures) == 3
    panel.fields["model"].value = "gpt2"
    assert panel.figures[-1] is toy and panel.pictures.value.count("<img") == 3
    assert len(AdvisorPanel(model="gpt2").figures) == 2


def test_the_panels_stored_text_is_the_same_each_time_and_has_no_address():
    one, other = AdvisorPanel(model="gpt2", memory=16.0), AdvisorPanel(model="gpt2", memory=16.0)
    assert one.text() == other.text()
    assert "Start with DDP" in one.text() and "0x" not in one.text()


def test_a_flow_marks_the_path_and_refuses_other_states():
    figure = flow([("one?", [Box("a", "no"), Box("b", "yes")]), ("two?", [Box("c"), Box("d")])], "start", Box("end"))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert {"✗ a", "✓ b", "c", "d", "end", "start", "one?", "two?"} <= set(words)
    assert png(figure, 40)
    with pytest.raises(ValueError, match="state is 'maybe'"):
        flow([("", [Box("a", "maybe")])], "", Box(""))
    with pytest.raises(ValueError, match="lanes is empty"):
        flow([], "", Box(""))


def test_stacks_show_totals_limits_and_measurements():
    figure = stacks(
        {"x": {"a": 1e9, "b": 2e9}, "y": {"a": 40e9}}, PARTS, limit=5e9, room=4e9, marked="x", dots={"x": 3.1e9}
    )
    axes = figure.axes[0]
    words = [text.get_text().strip() for text in axes.texts]
    assert words == ["3", "40 →"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["▸ x", "y"]
    assert png(figure, 40)
    for arguments, message in (
        (({}, PARTS), "bars is empty"),
        (({"x": {"c": 1.0}}, PARTS), "bars has part 'c'"),
    ):
        with pytest.raises(ValueError, match=message):
            stacks(*arguments)
    with pytest.raises(ValueError, match="dots has 'z'"):
        stacks({"x": {"a": 1.0}}, PARTS, dots={"z": 1.0})
