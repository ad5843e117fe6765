"""The live panel without a browser: one run per released value, errors and output kept with it, stable text."""

import re
import threading
import time

import ipywidgets
import pytest

from d2l_utils.plots import curves
from d2l_utils.widgets import LivePanel

WAIT = 30  # seconds until a test gives up


def draw(result):
    return curves({"value": [result, 2 * result]}, title=f"result {result}")


class Runs:
    """A run that keeps what it was called with and can be held."""

    def __init__(self):
        self.calls, self.threads, self.gate = [], [], threading.Event()
        self.gate.set()

    def __call__(self, world_size, stop):
        self.calls.append(world_size)
        self.threads.append(threading.current_thread())
        while not self.gate.wait(0.01):
            if stop.is_set():
                raise RuntimeError("the launch was stopped")
        if world_size == 8:
            raise ValueError("rank 1 failed: <b>boom</b>\n\nFile lesson.py, line 3")
        return world_size


def make(run, controls=None, **settings):
    settings.setdefault("world_sizes", (1, 2, 3, 4, 8))
    if settings["world_sizes"] is not None:
        settings.setdefault("start", {"world_size": 2})
    return LivePanel(run, draw, controls, **settings)


def release(panel, name, value):
    panel.knobs[name].value = value
    assert panel.wait(WAIT)


def test_first_run_is_made_at_once_in_the_calling_thread():
    run = Runs()
    panel = make(run)
    assert run.calls == [2]
    assert run.threads == [threading.current_thread()]
    assert panel.result == 2
    assert "showing: world size = 2" in panel.status.value


def test_an_error_of_the_first_run_is_raised_in_the_cell():
    with pytest.raises(ValueError, match="rank 1 failed"):
        make(Runs(), start={"world_size": 8})


def test_a_released_value_runs_once_in_another_thread_and_redraws():
    run = Runs()
    panel = make(run)
    before = panel.picture.value
    release(panel, "world_size", 4)
    assert run.calls == [2, 4]
    assert run.threads[1] is not threading.current_thread()
    assert panel.picture.value != before
    assert panel.result == 4


def test_w05_values_passed_in_a_drag_start_one_run(monkeypatch):
    monkeypatch.setattr("d2l_utils.widgets.live.SETTLE", 1.0)
    run = Runs()
    panel = make(run)
    for value in (1, 2, 3, 4):
        panel.knobs["world_size"].value = value
        time.sleep(0.3)
    assert panel.wait(WAIT)
    time.sleep(0.3)
    assert run.calls == [2, 4]


def test_w05_while_a_run_is_on_the_knobs_are_off_and_nothing_queues():
    run = Runs()
    panel = make(run)
    run.gate.clear()
    panel.knobs["world_size"].value = 4
    until(lambda: run.calls == [2, 4])
    assert panel.knobs["world_size"].disabled
    assert panel.again.disabled
    assert not panel.stop_button.disabled
    assert "running: world size = 4" in panel.status.value
    panel.knobs["world_size"].value = 1
    panel.again.click()
    run.gate.set()
    assert panel.wait(WAIT)
    time.sleep(0.5)  # longer than a queued run would have waited
    assert run.calls == [2, 4]
    assert panel.knobs["world_size"].value == 4, "the knob says what the figure shows"
    assert not panel.knobs["world_size"].disabled
    assert panel.stop_button.disabled


def test_a_panel_that_is_closed_starts_no_run_any_more():
    """What was released just before would run on ranks that nobody sees or can stop."""
    run = Runs()
    panel = make(run)
    panel.knobs["world_size"].value = 3
    panel.close()
    assert panel.wait(WAIT)
    panel.release(settle=0)
    time.sleep(0.3)  # longer than a released value settles
    assert run.calls == [2]


def test_run_again_runs_once_more():
    run = Runs()
    panel = make(run)
    panel.again.click()
    assert panel.wait(WAIT)
    assert run.calls == [2, 2]


def test_w04_an_error_stands_beside_the_knob_and_the_next_run_clears_it():
    panel = make(Runs())
    before = panel.picture.value
    release(panel, "world_size", 8)
    assert isinstance(panel.error, ValueError)
    assert 'role="alert"' in panel.status.value
    assert "rank 1 failed: &lt;b&gt;boom&lt;/b&gt;" in panel.status.value, "escaped"
    assert "File lesson.py, line 3" in panel.status.value
    assert "still shows world size = 2" in panel.status.value
    assert before in panel.picture.value, "the last good picture, dimmed"
    assert panel.knobs["world_size"].value == 8
    release(panel, "world_size", 3)
    assert panel.error is None
    assert "alert" not in panel.status.value
    assert panel.result == 3


def test_w04_an_error_while_drawing_is_shown_too():
    def fails(result):
        if result == 3:
            raise KeyError("no such series")
        return draw(result)

    panel = LivePanel(Runs(), fails, start={"world_size": 2})
    release(panel, "world_size", 3)
    assert "KeyError" in panel.status.value
    assert panel.result == 2


def test_stop_sets_the_runs_event_and_says_so():
    run = Runs()
    panel = make(run)
    run.gate.clear()
    panel.knobs["world_size"].value = 4
    until(lambda: run.calls == [2, 4])
    panel.stop_button.click()
    assert panel.wait(WAIT)
    assert "stopped: world size = 4. The picture still shows world size = 2." in panel.status.value
    run.gate.set()
    panel.again.click()
    assert panel.wait(WAIT)
    assert panel.result == 4, "the next run works"


def test_a_run_that_cannot_stop_has_no_stop_button():
    gate = threading.Event()
    gate.set()

    def run(world_size):
        gate.wait(WAIT)
        return world_size

    panel = make(run)
    gate.clear()
    panel.again.click()
    until(lambda: panel.again.disabled)
    assert panel.stop_button.disabled
    gate.set()
    assert panel.wait(WAIT)


def test_w08_what_a_run_prints_stays_in_the_panel(capsys):
    gate = threading.Event()
    gate.set()

    def run(world_size):
        print(f"<rank> at {world_size}")
        gate.wait(WAIT)
        return world_size

    panel = make(run)
    gate.clear()
    panel.knobs["world_size"].value = 3
    until(lambda: panel.again.disabled)
    print("another cell")
    gate.set()
    assert panel.wait(WAIT)
    assert capsys.readouterr().out == "another cell\n"
    assert "&lt;rank&gt; at 3" in panel.log.value
    assert "another" not in panel.log.value


def test_ranks_own_output_is_shown_when_the_run_is_quiet():
    class Result:
        output = ("one\ntwo", "three")

    panel = LivePanel(lambda: Result(), lambda r: draw(1), world_sizes=None)
    assert "[rank 0] one\n[rank 0] two\n[rank 1] three" in panel.log.value


def test_progress_bars_become_one_line_and_the_log_keeps_its_tail():
    def run():
        for at in range(100):
            print(f"\rstep {at}", end="")
        print()
        for at in range(2000):
            print(f"line {at}")
        return 1

    panel = LivePanel(run, draw, world_sizes=None)
    assert "line 1999" in panel.log.value
    assert "line 1\n" not in panel.log.value

    def bar():
        for at in range(100):
            print(f"\rstep {at}", end="")
        return 1

    assert re.findall("step [0-9]+", LivePanel(bar, draw, world_sizes=None).log.value) == ["step 99"]


def test_w01_w03_w09_a_panel_is_a_widget_a_png_and_text_without_values():
    panel = make(Runs(), describe=lambda result: "the ranks agree: True")
    bundle, metadata = panel._repr_mimebundle_()
    assert metadata == {
        "image/png": {"alt": "Live panel; knobs: world size. Figure: curves. The ranks agree: True. Result 2."}
    }
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert bundle["text/plain"] == "[live panel; knobs: world size]\n[figure: curves]\nthe ranks agree: True"
    release(panel, "world_size", 4)
    again, _ = panel._repr_mimebundle_()
    assert again["text/plain"] == bundle["text/plain"], "no value, address or time"
    assert again["image/png"] != bundle["image/png"]


def test_every_control_has_a_label_and_sends_only_released_values():
    slider = ipywidgets.IntSlider(1, min=1, max=8, description="bucket", continuous_update=True)
    panel = make(
        lambda **values: 1,
        {"blocks": range(1, 9), "kind": ["a", "b"], "overlap": True, "bucket": slider, "size": {"1 MiB": 1}},
    )
    for control in (*panel.knobs.values(), panel.again, panel.stop_button):
        assert control.description
        assert getattr(control, "continuous_update", False) is False
    assert panel.values == {
        "world_size": 2, "blocks": 1, "kind": "a", "overlap": True, "bucket": 1, "size": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("controls", "start", "error", "message"),
    [
        ({"blocks": 3}, {}, TypeError, r"controls\['blocks'\] is 3; allowed: a range"),
        ({"blocks": "abc"}, {}, TypeError, r"controls\['blocks'\] is 'abc'"),
        ({"blocks": []}, {}, TypeError, r"controls\['blocks'\] is \[\]"),
        ({"blocks": range(1, 4)}, {"blocks": 9}, ValueError, r"start\['blocks'\] is 9; allowed: \[1, 2, 3\]"),
        ({}, {"size": 1}, ValueError, r"start names \['size'\]; the knobs are \['world_size'\]"),
    ],
)
def test_bad_controls_name_themselves(controls, start, error, message):
    with pytest.raises(error, match=message):
        LivePanel(Runs(), draw, controls, start={"world_size": 2} | start)


def test_default_world_size_is_a_choice_even_when_it_is_not_listed(monkeypatch):
    monkeypatch.setenv("D2L_WORLD_SIZE", "6")
    panel = LivePanel(Runs(), draw)
    assert panel.values == {"world_size": 6}
    assert [value for _, value in panel.knobs["world_size"].options] == [1, 2, 3, 4, 6, 8]


def until(true, seconds=WAIT):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_that_begins_with_a_knobs_name_stands_beside_that_knob():
    def run(world_size, size):
        if size > world_size:
            raise ValueError(f"size is {size}: it must be <= world_size")
        return size

    panel = make(run, {"size": range(1, 9)})
    release(panel, "size", 4)
    assert "size is 4: it must be &lt;= world_size" in panel.slots["size"].value
    assert panel.slots["world_size"].value == "" and "alert" not in panel.status.value
    assert "still shows world size = 2, size = 1" in panel.status.value
    release(panel, "world_size", 4)
    assert panel.slots["size"].value == "" and panel.result == 4
