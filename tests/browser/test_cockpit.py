"""The cockpit in JupyterLab: through every strategy, from the keyboard, in large type, and stopped half-way."""

import psutil
import pytest

from chapter19_9.strategies import STRATEGIES

from .conftest import SCREENSHOTS

CELL = "from chapter19_9.cockpit import Cockpit\ncockpit = Cockpit(world_size=2, blocks=2, width=32, strategy='single')\ncockpit"


def running(lab) -> set[int]:
    return {process.pid for process in lab.family() if process.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(scope="module")
def cockpit(lab, shared_page):
    lab.write("cockpit.ipynb", CELL)
    shared_page.open(lab, "cockpit.ipynb")
    shared_page.run_all()
    assert shared_page.failures() == []
    return shared_page


def knob(cockpit, name):
    return cockpit.page.get_by_label(name, exact=True)


def showing(cockpit, words):
    cockpit.page.get_by_text(f"showing: world size = 2, {words}").wait_for()


def test_every_strategy_is_flown(cockpit):
    [before] = cockpit.sources()
    for name in STRATEGIES:
        if name != "single":
            knob(cockpit, "strategy").select_option(name)
            showing(cockpit, f"strategy = {name},")
            [now] = cockpit.sources()
            assert now != before, name
            before = now
    assert cockpit.page.get_by_role("alert").count() == 0
    assert cockpit.failures() == []
    cockpit.check()


def test_it_is_driven_from_the_keyboard_and_read_from_afar(cockpit):
    knob(cockpit, "strategy").focus()
    cockpit.page.keyboard.press("Home")
    showing(cockpit, "strategy = single,")
    cockpit.page.keyboard.press("Tab")
    assert cockpit.page.evaluate("document.activeElement.labels?.[0]?.innerText ?? ''") == "batch"
    image = cockpit.page.get_by_role("img", name="memory bars")

    def height():
        box = image.bounding_box()  # none in the moment in which one picture gives way to the next
        return box["height"] if box else 0.0

    cockpit.until(height, why="the picture is there")
    small = height()
    cockpit.page.get_by_role("button", name="Large type").press("Space")
    cockpit.until(lambda: height() > 1.5 * small, why="one column, larger")
    cockpit.keep(SCREENSHOTS / "cockpit_large.png")
    cockpit.page.get_by_role("button", name="Large type").press("Space")
    cockpit.until(lambda: height() == small, why="as before")
    cockpit.page.get_by_text("this run as a script").click()
    cockpit.page.get_by_text("run_rank(train, strategy='single'").wait_for()
    cockpit.keep(SCREENSHOTS / "cockpit.png")


def test_a_run_stopped_half_way_leaves_no_rank(lab, cockpit):
    knob(cockpit, "strategy").select_option("zero3")
    showing(cockpit, "strategy = zero3,")
    knob(cockpit, "blocks").select_option("8")
    showing(cockpit, "strategy = zero3, batch = 24, accumulation = 1, blocks = 8,")
    knob(cockpit, "bandwidth").select_option("5 MB/s")
    cockpit.page.get_by_text("showing: world size = 2, strategy = zero3").get_by_text("bandwidth = 5").wait_for()
    [before], at_rest = cockpit.sources(), running(lab)
    knob(cockpit, "width").select_option("128")  # 10 MB a step over that link: two seconds each
    cockpit.until(lambda: len(running(lab) - at_rest) >= 2, why="ranks run")
    cockpit.page.get_by_role("button", name="Stop").click()
    cockpit.page.get_by_text("stopped: world size = 2, strategy = zero3").wait_for()
    cockpit.until(lambda: running(lab) <= at_rest, 5, "no rank is left")
    assert cockpit.sources() == [before], "the picture is still that of the last whole run"
    cockpit.check()
