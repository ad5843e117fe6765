"""The memory slider: drawn with a model of the test's own, and in JupyterLab. The formulas are the chapter's."""

import json

from chapter19_9 import theory
from d2l_utils.widgets import MemorySlider

from .conftest import ROOT, SCREENSHOTS, watched

SCRIPT = ROOT / "d2l_utils" / "widgets" / "bars.js"
# What anywidget gives a module, without a kernel behind it.
MODEL = """
const state = STATE, heard = {};
window.model = { get: (n) => state[n], on: (n, act) => { heard[n] = act; }, off: (n) => { delete heard[n]; } };
window.stop = widget.render({ model: window.model, el: document.body });
"""
STAGES = ("ddp", "zero1", "zero2", "zero3")


def formula(ranks, billions):
    whole = theory.mixed_precision_states(billions * 1e9)
    return {name: theory.memory(name, whole, ranks) for name in STAGES}


def points(ranks, billions):
    return {"zero3": (1e9, 2e9, 1e9)} if ranks == 64 else None


KNOBS = {"ranks": [1, 4, 16, 64], "billions": [1.5, 7.5]}


def test_keys_move_it_and_bars_and_marks_are_as_high_as_the_bytes(browser):
    slider = MemorySlider(KNOBS, formula, points, title="states")
    state = json.dumps({name: getattr(slider, name) for name in slider.keys if not name.startswith("_")}, default=str)
    script = SCRIPT.read_text().replace("export default", "const widget =")
    with watched(browser) as page:
        page.page.set_content(
            f"<!doctype html><meta charset=utf-8><body><script type=module>{script}{MODEL.replace('STATE', state)}</script>"
        )
        ranks, status = page.page.get_by_role("slider", name="ranks"), page.page.get_by_role("status")
        ranks.wait_for()
        page.page.keyboard.press("Tab")
        page.page.keyboard.press("End")
        assert page.page.locator(".mark:visible").count() == 4, "three beside the bar, one in the key"
        page.page.keyboard.press("Tab")
        page.page.keyboard.press("ArrowRight")
        assert ranks.get_attribute("aria-valuetext") == "64"
        # the ZeRO paper's example
        words = status.inner_text().split("; ")
        assert [word.partition(" (")[0] for word in words] == [
            "ddp: 120 GB",
            "zero1: 31.4 GB",
            "zero2: 16.6 GB",
            "zero3: 1.88 GB",
        ]
        assert words[3].endswith("measured P 1 GB, G 2 GB, O 1 GB")
        page.page.screenshot(path=SCREENSHOTS / "memory_slider.png")
        ground = "document.querySelector('.plot').getBoundingClientRect().bottom"
        heights = page.page.locator(".bar").evaluate_all(
            f"bars => bars.map(bar => {ground} - [...bar.children].at(2).getBoundingClientRect().top)"
        )
        totals = [states.total for states in formula(64, 7.5).values()]
        assert all(abs(h / heights[0] - t / totals[0]) < 0.01 for h, t in zip(heights, totals, strict=True)), heights
        marks = page.page.locator(".bar .mark").evaluate_all(
            f"marks => marks.map(m => m.getBoundingClientRect()).map(box => {ground} - (box.top + box.bottom) / 2)"
        )
        pixel = heights[0] / totals[0]
        assert all(abs(at - pixel * value) < 2 for at, value in zip(marks, (1e9, 3e9, 4e9), strict=True)), marks
        page.page.evaluate("window.stop()")
        page.check()


def test_in_jupyterlab_a_key_redraws_without_the_kernel(lab, page):
    lab.write(
        "slider.ipynb",
        "from d2l_utils.widgets import MemorySlider\n"
        "slider = MemorySlider({'devices': [1, 2, 4]}, lambda devices: {'one': (8, 8, 16 / devices)})\nslider",
        "slider.move(devices=4)",
    )
    page.open(lab, "slider.ipynb")
    page.run_all()
    assert page.failures() == []
    status = page.page.locator(".d2b").get_by_role("status")
    page.until(lambda: "one: 20 B" in status.inner_text(), why="Python moved it")
    slider = page.page.get_by_role("slider", name="devices")
    slider.focus()
    page.page.keyboard.press("ArrowLeft")
    assert status.inner_text() == "one: 24 B (P 8 B, G 8 B, O 8 B)", "at once: nothing was waited for"
    assert slider.get_attribute("aria-valuetext") == "2"
