"""The lifecycle player: drawn with a model of the test's own, and in JupyterLab. Its films are recorded by real ranks."""

import json

import pytest

from chapter19_9.lifecycle import lifecycle
from d2l_utils.transformer import TransformerConfig
from d2l_utils.widgets.lifecycle import aligned

from .conftest import ROOT, SCREENSHOTS, watched

SMALL = TransformerConfig(layers=3, width=32, heads=2, length=16)
SCRIPT = ROOT / "d2l_utils" / "widgets" / "lifecycle.js"
# What anywidget gives a module, without a kernel behind it.
MODEL = """
const state = STATE, heard = {};
window.saved = [];
window.model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; },
  save_changes: () => window.saved.push(state.step),
  on: (name, act) => { heard[name] = act; },
  off: (name) => { delete heard[name]; },
};
window.fromPython = (step) => { state.step = step; heard["change:step"](); };
window.heard = heard;
window.stop = widget.render({ model: window.model, el: document.body });
"""


@pytest.fixture(scope="module")
def films():
    return [lifecycle(name, SMALL, world_size=2).data() for name in ("fsdp2", "ddp")]


@pytest.fixture
def player(browser):
    """player(films, **media) -> a page with nothing on it but the player."""
    pages = []

    def show(films, width=1000, **media):
        watch = watched(browser)
        page = watch.__enter__()
        pages.append((watch, page))
        page.page.emulate_media(**media)
        page.page.set_viewport_size({"width": width, "height": 900})
        script = SCRIPT.read_text().replace("export default", "const widget =")
        state = json.dumps({"films": films, "steps": aligned(films), "step": 0})
        page.page.set_content(
            f"<!doctype html><meta charset=utf-8><body><script type=module>{script}{MODEL.replace('STATE', state)}</script>"
        )
        page.page.get_by_role("button", name="play", exact=True).wait_for()
        return page

    yield show
    for watch, page in pages:
        watch.__exit__(None, None, None)
        page.check()


def at(page):
    return int(page.page.get_by_label("frame", exact=True).input_value())


def test_what_is_written_in_the_cells_is_what_the_frame_says(films, player):
    """Read as text: without colours, hatches or lengths."""
    film = films[0]
    page = player(films[:1])
    names = {"F": "▶ forward", "B": "◀ backward", "O": "✎ update", ".": ""}
    for number in range(0, len(film["frames"]), 3):
        page.page.get_by_label("frame", exact=True).fill(str(number))
        frame = film["frames"][number]
        assert page.page.locator(".words b").inner_text() == frame["words"]
        cells = page.page.locator("td.cell").evaluate_all(
            "cells => cells.map(cell => [...cell.children].map(part => part.textContent))"
        )
        for place, cell in enumerate(cells):
            codes = frame["states"][4 * place : 4 * place + 4]
            labels = [kind["states"][code][0] for kind, code in zip(film["kinds"], codes, strict=False)]
            assert cell == [names[codes[3]], *(f"{letter}{label}" for letter, label in zip("PGO", labels, strict=True))]
        busy = page.page.locator(".net td").evaluate_all("cells => cells.map(cell => cell.className === 'on')")
        assert busy == [any(c in flight[1] for flight in frame["flights"]) for c in range(len(film["columns"]))]
    shot = next(i for i, frame in enumerate(film["frames"]) if frame["flights"] and "B" in frame["states"])
    page.page.get_by_label("frame", exact=True).fill(str(shot))
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.page.screenshot(path=SCREENSHOTS / "lifecycle_player.png")


def test_bars_are_as_long_as_the_bytes(films, player):
    film = films[0]
    page = player(films[:1])
    shares = page.page.locator("td.cell .kind").evaluate_all(
        "bars => bars.map(bar => bar.firstChild.getBoundingClientRect().width / bar.clientWidth)"
    )
    columns, frame = len(film["columns"]), film["frames"][0]
    for place, share in enumerate(shares):
        cell, kind = divmod(place, 3)
        held, whole = film["table"][frame["held"][cell]][kind], film["whole"][cell % columns][kind]
        assert share == pytest.approx(min(1, held / whole), abs=0.02)


def test_keys_move_the_player(films, player):
    page = player(films[:1])
    last = len(films[0]["frames"]) - 1
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.className") == "slc"
    for key, expected in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("Home", 0),
        ("ArrowLeft", 0),
    ]:
        page.page.keyboard.press(key)
        assert at(page) == expected, key
    page.page.keyboard.press("Space")
    page.page.get_by_role("button", name="pause").wait_for()
    page.until(lambda: at(page) >= 2, 10, "it plays")
    page.page.keyboard.press("Space")
    page.page.get_by_role("button", name="play", exact=True).wait_for()
    stopped = at(page)
    page.page.wait_for_timeout(1000)
    assert at(page) == stopped


def test_it_plays_to_its_end_and_starts_again(films, player):
    page = player(films[:1])
    last = len(films[0]["frames"]) - 1
    page.page.get_by_label("speed").select_option("4")
    page.page.get_by_label("frame", exact=True).fill(str(last - 2))
    page.page.get_by_role("button", name="play", exact=True).click()
    page.until(lambda: at(page) == last, 10, "it reaches the end")
    page.page.get_by_role("button", name="play", exact=True).wait_for()
    assert page.page.evaluate("saved") == [], "the kernel is told nothing"
    page.page.get_by_role("button", name="play", exact=True).click()
    page.until(lambda: 0 < at(page) < 5, 10, "it begins again")


def test_buttons_step_and_python_moves_it(films, player):
    page = player(films[:1])
    page.page.get_by_role("button", name="one frame on").click()
    page.page.get_by_role("button", name="one frame on").click()
    page.page.get_by_role("button", name="one frame back").click()
    assert at(page) == 1
    page.page.evaluate("fromPython(7)")
    assert at(page) == 7
    page.page.get_by_role("button", name="first frame").click()
    assert at(page) == 0


def test_a_screen_reader_gets_names_and_words(films, player):
    page = player(films)
    unnamed = page.page.locator("button, input, select, svg, table").evaluate_all(
        "all => all.filter(one => !one.ariaLabel).map(one => one.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    slider = page.page.get_by_label("frame", exact=True)
    slider.fill("4")
    words = [film["frames"][step]["words"] for film, step in zip(films, aligned(films)[4], strict=True)]
    assert all(word in slider.get_attribute("aria-valuetext") for word in words)
    assert all(word in page.page.get_by_role("status").inner_text() for word in words)
    assert page.page.get_by_role("rowheader", name="rank 1").count() == 2
    assert page.page.get_by_role("columnheader", name="block 2").count() == 2


def test_two_films_are_in_the_same_phase(films, player):
    page = player(films, width=1280)
    boxes = [page.page.locator(".film").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    for step, (one, other) in enumerate(aligned(films)):
        assert films[0]["frames"][one]["phase"] == films[1]["frames"][other]["phase"]
        if step % 10 == 0:
            page.page.get_by_label("frame", exact=True).fill(str(step))
            shown = page.page.locator(".words b").all_inner_texts()
            assert shown == [films[0]["frames"][one]["words"], films[1]["frames"][other]["words"]]
    page.page.screenshot(path=SCREENSHOTS / "lifecycle_side_by_side.png")


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_is_honoured(films, player, motion):
    page = player(films[:1], reduced_motion=motion)
    page.page.get_by_label("frame", exact=True).fill("1")
    page.page.get_by_role("button", name="play", exact=True).click()
    moving = page.page.locator(".kind.moving i").first
    assert moving.evaluate("one => getComputedStyle(one).animationName") == (
        "none" if motion == "reduce" else "slc-flow"
    )
    page.until(lambda: at(page) > 1, 10, "it still plays")


def test_taken_away_it_stops(films, player):
    page = player(films[:1])
    page.page.get_by_role("button", name="play", exact=True).click()
    page.page.evaluate("stop()")
    before = at(page)
    page.page.wait_for_timeout(1000)
    assert at(page) == before
    assert page.page.evaluate("Object.keys(heard)") == []


@pytest.mark.timeout(400)
def test_in_jupyterlab_and_after_its_kernel_has_gone(lab, page):
    lab.write(
        "lifecycle.ipynb",
        "from chapter19_9.lifecycle import lifecycle\nfrom d2l_utils.widgets import ShardLifecycle\n"
        "films = [lifecycle(name, world_size=2) for name in ('fsdp2', 'fsdp2_no_reshard')]\n"
        "player = ShardLifecycle(*films)\nplayer",
        "player.step = 3 if player.step == 7 else 7",
    )
    page.open(lab, "lifecycle.ipynb")
    page.run_all()
    assert page.failures() == []
    output = page.page.locator(".jp-OutputArea-output .slc")
    output.wait_for()
    assert page.page.locator(".jp-OutputArea-output img").count() == 0, "the player stands in for its picture"
    output.focus()
    selected = page.page.locator(".jp-Cell.jp-mod-selected").count(), page.page.locator(".jp-Cell").count()
    for _ in range(4):
        page.page.keyboard.press("ArrowRight")
    assert at(page) == 7 + 4
    assert (page.page.locator(".jp-Cell.jp-mod-selected").count(), page.page.locator(".jp-Cell").count()) == selected
    page.run_cell(1)
    page.until(lambda: at(page) == 3, 5, "Python moves it")
    page.page.screenshot(path=SCREENSHOTS / "lifecycle_in_jupyterlab.png")

    lab.end_kernels()
    page.page.wait_for_timeout(1000)
    output.get_by_label("speed").select_option("4")
    output.get_by_role("button", name="play", exact=True).click()
    page.until(lambda: at(page) > 10, 20, "it plays without a kernel")
    output.get_by_role("button", name="pause").click()
    before = at(page)
    output.get_by_role("button", name="one frame on").click()
    assert at(page) == before + 1
