"""A panel's run waits for the launches of cells and of other panels, and nothing else waits (H7)."""

import threading
import time

import pytest

from d2l_utils.launching.turns import counted
from tests.unit.test_widgets_live import WAIT, Runs, make, release, until


class Launch:
    """A launch by another thread, as `launch` itself is counted; `end()` ends it."""

    def __init__(self):
        self._gate, on = threading.Event(), threading.Event()

        @counted
        def run():
            on.set()
            assert self._gate.wait(WAIT)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert on.wait(WAIT)

    def end(self):
        self._gate.set()
        self._thread.join(WAIT)


@pytest.fixture
def launched():
    """launched() -> a launch that is on until the test ends it."""
    made = []

    def start():
        made.append(Launch())
        return made[-1]

    yield start
    for one in made:
        one.end()


WAITING = "waiting for the end of another launch: world size = 4"


def test_a_released_knob_waits_for_a_running_cells_launch_and_says_so(launched):
    run = Runs()
    panel = make(run)
    cell = launched()
    panel.knobs["world_size"].value = 4
    until(lambda: WAITING in panel.status.value)
    assert panel.knobs["world_size"].disabled and not panel.stop_button.disabled
    time.sleep(0.3)
    assert run.calls == [2]
    cell.end()
    assert panel.wait(WAIT)
    assert (run.calls, panel.result) == ([2, 4], 4)
    assert "showing: world size = 4" in panel.status.value


def test_a_knob_does_not_start_between_two_launches_of_a_cell(launched):
    run = Runs()
    panel = make(run)
    first = launched()
    panel.knobs["world_size"].value = 4
    until(lambda: WAITING in panel.status.value)
    first.end()
    time.sleep(0.05)
    second = launched()
    time.sleep(0.5)
    assert run.calls == [2]
    second.end()
    assert panel.wait(WAIT) and run.calls == [2, 4]


def test_two_panels_take_turns():
    first, second = Runs(), Runs()
    one, other = make(first), make(second)
    first.gate.clear()
    one.knobs["world_size"].value = 4
    until(lambda: first.calls == [2, 4])
    other.knobs["world_size"].value = 4
    until(lambda: WAITING in other.status.value)
    time.sleep(0.3)
    assert second.calls == [2]
    first.gate.set()
    assert one.wait(WAIT) and other.wait(WAIT)
    assert second.calls == [2, 4]


def test_a_waiting_knob_can_be_stopped_and_closed(launched):
    run = Runs()
    panel, closed = make(run), make(run)
    launched()
    for one, end in ((panel, panel.stop_button.click), (closed, closed.close)):
        one.knobs["world_size"].value = 4
        until(lambda one=one: WAITING in one.status.value)
        end()
        assert one.wait(WAIT)
    assert run.calls == [2, 2]
    assert "stopped: world size = 4. The picture still shows world size = 2." in panel.status.value


def test_a_cell_that_waits_for_its_panel_does_not_wait_for_itself():
    """The launch of a cell ends before the cell goes on, and a run in its panel's own thread is no other launch."""
    panel = make(counted(Runs()))
    release(panel, "world_size", 4)
    assert panel.result == 4 and WAITING not in panel.status.value


def test_launch_itself_is_counted_and_never_waits(launched):
    from d2l_utils import launch
    from d2l_utils.launching import turns

    launched()
    seen = []
    with pytest.raises(ValueError, match="world_size is 0"):
        launch(print, world_size=0)
    assert len(turns._running) == 1, "a launch that failed is over"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "d2l_utils.launching.launcher.check_world_size", lambda size: seen.append(len(turns._running)) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            launch(print)
    assert seen == [2]
