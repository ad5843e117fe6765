"""The memory slider without a browser: every combination is there, measured points where there are some, stable text."""

from types import SimpleNamespace

import pytest

from d2l_utils.widgets import MemorySlider

KNOBS = {"ranks": [1, 2, 4], "model_size": {"small": 10, "large": 1000}, "kind": ["a", "b"]}


def formula(ranks, model_size, kind):
    scale = 1 if kind == "a" else 2
    whole = [scale * model_size, scale * model_size, 2 * scale * model_size]
    return {"copies": whole, "shards": tuple(value / ranks for value in whole)}


def points(ranks, model_size, kind):
    return {"shards": {"parameters": 6, "gradients": 5, "optimizer": None}} if (ranks, kind) == (2, "a") else None


def make(**settings):
    return MemorySlider(KNOBS, formula, points, title="states", **settings)


def test_every_combination_is_given_to_the_browser_in_the_knobs_own_order():
    slider = make()
    assert slider.bars == ["copies", "shards"]
    assert [(knob["name"], knob["labels"], knob["slider"]) for knob in slider.knobs] == [
        ("ranks", ["1", "2", "4"], True),
        ("model size", ["small", "large"], True),
        ("kind", ["a", "b"], False),
    ]
    rows = [(n, size, kind) for n in (1, 2, 4) for size in (10, 1000) for kind in "ab"]
    assert slider.values == [[list(map(float, bar)) for bar in formula(*row).values()] for row in rows]
    measured = [row[0] == 2 and row[2] == "a" for row in rows]
    assert slider.points == [[None, [6.0, 5.0, 0.0] if here else None] for here in measured]


def test_what_is_shown_follows_the_knobs():
    slider = make(start={"ranks": 4, "kind": "b"})
    assert slider.at == [2, 0, 1]
    assert slider.shown == ({"copies": [20, 20, 40], "shards": [5, 5, 10]}, {})
    slider.move(ranks=2, kind="a")
    assert slider.shown == ({"copies": [10, 10, 20], "shards": [5, 5, 10]}, {"shards": [6, 5, 0]})
    assert slider.at == [1, 0, 0]


def test_held_bytes_are_points_as_they_are():
    def held(ranks):
        return {"all": SimpleNamespace(parameters=4, gradients=None, optimizer=8, total=12)}

    slider = MemorySlider({"ranks": [1]}, held, held)
    assert slider.values == slider.points == [[[4.0, 0.0, 8.0]]]


def test_w01_w09_it_is_a_widget_a_png_and_text_without_anything_measured():
    slider = make(start={"ranks": 2, "model_size": 1000})
    data, _ = slider._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
    assert data["text/plain"] == (
        "[states; knobs: ranks, model size, kind]\nranks 2, model size large, kind a: copies 4 kB, shards 2 kB"
    )
    other = MemorySlider(KNOBS, formula, title="states", start={"ranks": 2, "model_size": 1000})
    again, _ = other._repr_mimebundle_()
    assert again["text/plain"] == data["text/plain"]
    assert again["image/png"] != data["image/png"], "the measured points are drawn"


def shrinking(ranks):
    return {"one": (1, 1, 1)} if ranks == 1 else {}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MemorySlider({}, formula), "knobs is empty"),
        (lambda: MemorySlider({"ranks": []}, shrinking), r"knobs\['ranks'\] is \[\]"),
        (lambda: MemorySlider({"ranks": range(1, 30_000)}, shrinking), "29,999 combinations: at most 20,000"),
        (lambda: MemorySlider({"ranks": [1, 2]}, shrinking), r"gives the bars \[\] for \{'ranks': 2\}, but \['one'\]"),
        (lambda: MemorySlider({"ranks": [1]}, shrinking, formula_of_two), r"points gives \['two'\] for \{'ranks': 1\}"),
        (lambda: make(start={"ranks": 3}), r"ranks is 3; allowed: \[1, 2, 4\]"),
        (lambda: make(start={"size": 3}), r"size is no knob: they are \['ranks', 'model_size', 'kind'\]"),
    ],
)
def test_what_does_not_fit_names_itself(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def formula_of_two(ranks):
    return {"two": (1, 1, 1)}
