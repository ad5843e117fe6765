"""Panels in JupyterLab: knobs, Stop, errors, where output goes, and what a stored notebook shows."""

import base64

import nbformat
import psutil
import pytest

from d2l_utils.plots import bundle, curves

from .conftest import SCREENSHOTS

SETUP = """\
from pathlib import Path
from d2l_utils import launch
from d2l_utils.plots import curves
from d2l_utils.widgets import LivePanel

def work(folder, seconds):
    import os, time
    from pathlib import Path
    import torch, torch.distributed as dist
    Path(folder, f"rank{os.getpid()}").touch()
    print("hello from a rank")
    if dist.get_world_size() == 3:
        raise ValueError("three is <i>not</i> welcome")
    time.sleep(seconds)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

def run(world_size, seconds, extra, stop):
    return launch(work, world_size=world_size, stop=stop, folder=str(Path.cwd()), seconds=seconds)

def draw(run):
    return curves({"sum": run.results}, title=f"sum is {run.results[0]:.0f}", x="rank")
"""
PANEL = """\
from ipywidgets import IntSlider
panel = LivePanel(
    run, draw, {"seconds": (0, 3, 300), "extra": IntSlider(1, min=1, max=8, description="extra")},
    world_sizes=(1, 2, 3), start={"world_size": 2},
)
panel
"""


@pytest.fixture(scope="module")
def notebook(lab, shared_page):
    """A notebook with one live panel on real ranks, run to its end."""
    folder = lab.root / "panel"
    folder.mkdir()
    lab.write("panel/panel.ipynb", SETUP, PANEL, "print('another cell')")
    shared_page.open(lab, "panel/panel.ipynb")
    shared_page.run_all()
    assert shared_page.failures() == []
    shared_page.folder = folder
    return shared_page


@pytest.fixture
def panel(notebook, request):
    """The same notebook with a new panel: two ranks, no waiting."""
    notebook.run_cell(1)
    notebook.page.get_by_text("showing: world size = 2, seconds = 0, extra = 1").wait_for()
    yield notebook
    notebook.keep(SCREENSHOTS / f"{request.node.name}.png")
    assert notebook.failures() == []
    notebook.check()


def pids(folder) -> set[int]:
    """Processes that were ranks: each leaves a file with its pid in its name."""
    return {int(path.name.removeprefix("rank")) for path in folder.glob("rank*")}


def alive(numbers: set[int]) -> set[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return {pid for pid in numbers if lives(pid)}


def test_world_size_changes_through_the_knob_and_the_figure_follows(panel):
    [before] = panel.sources()
    earlier = pids(panel.folder)
    panel.page.get_by_label("world size", exact=True).select_option("1")
    panel.until(lambda: panel.sources() != [before], why="the figure is redrawn")
    panel.page.get_by_text("showing: world size = 1, seconds = 0, extra = 1").wait_for()
    assert len(pids(panel.folder) - earlier) == 1


def test_stop_button_leaves_no_rank(panel):
    [before] = panel.sources()
    earlier = pids(panel.folder)
    assert panel.page.get_by_role("button", name="Stop").is_disabled()
    panel.page.get_by_label("seconds", exact=True).select_option("300")
    panel.until(lambda: len(pids(panel.folder) - earlier) == 2, why="two ranks run")
    ranks = pids(panel.folder) - earlier
    assert alive(ranks) == ranks
    panel.page.get_by_text("running: world size = 2, seconds = 300, extra = 1").wait_for()
    assert panel.page.get_by_label("world size", exact=True).is_disabled(), "W05: the knobs are off while a run is on"
    panel.page.get_by_role("button", name="Stop").click()
    panel.page.get_by_text("stopped: world size = 2, seconds = 300, extra = 1").wait_for()
    panel.until(lambda: not alive(ranks), 5, "no rank is left")
    assert panel.sources() == [before], "the picture is still that of the last whole run"
    # And the next run works.
    panel.page.get_by_label("seconds", exact=True).select_option("0")
    panel.page.get_by_text("showing: world size = 2, seconds = 0, extra = 1").wait_for()


def test_w04_error_stands_beside_the_knob(panel):
    panel.page.get_by_label("world size", exact=True).select_option("3")
    alert = panel.page.get_by_role("alert")
    alert.wait_for()
    words = alert.inner_text()
    assert "LaunchError" in words
    assert "three is <i>not</i> welcome" in words, "escaped, not rendered"
    assert "still shows world size = 2" in words
    alert.get_by_text("where").click()
    assert "raise ValueError" in alert.inner_text()
    knob, shown = panel.page.get_by_label("world size", exact=True).bounding_box(), alert.bounding_box()
    assert 0 <= shown["y"] - knob["y"] < 80, "right under the knobs"


def test_w05_dragging_starts_one_launch(panel):
    earlier = pids(panel.folder)
    handle = panel.page.locator(".widget-slider [role=slider]")
    box = handle.bounding_box()
    mouse = panel.page.mouse
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    for _ in range(20):
        box["x"] += 10
        mouse.move(box["x"], box["y"] + box["height"] / 2)
        panel.page.wait_for_timeout(50)
    assert pids(panel.folder) == earlier, "nothing runs before the release"
    mouse.up()
    panel.page.get_by_text("showing: world size = 2, seconds = 0, extra = 8").wait_for()
    panel.page.wait_for_timeout(1000)
    assert len(pids(panel.folder) - earlier) == 2
    assert panel.page.get_by_label("world size", exact=True).is_enabled()


def test_w08_output_of_a_run_stays_in_its_panel(panel):
    panel.page.get_by_label("seconds", exact=True).select_option("3")
    panel.page.get_by_text("running:").wait_for()
    cell = panel.page.locator(".jp-CodeCell").nth(2)
    panel.run_cell(2)
    assert panel.page.get_by_text("running:").is_visible(), "the cell ran during the launch"
    panel.page.get_by_text("showing: world size = 2, seconds = 3, extra = 1").wait_for()
    cell.locator(".jp-OutputArea-output").get_by_text("another cell").wait_for()
    assert cell.locator(".jp-OutputArea-output").all_inner_texts() == ["another cell\n"]
    panel.page.get_by_text("output of the ranks").click()
    log = panel.page.locator(".jp-CodeCell").nth(1).locator("details pre").inner_text()
    assert sorted(line for line in log.splitlines() if "hello" in line) == [
        "[rank 0] hello from a rank",
        "[rank 1] hello from a rank",
    ]


def stored_output() -> nbformat.NotebookNode:
    """What the builder stores for a panel: its picture and its text, without the view that needs a kernel."""
    data = bundle(curves({"a": [1, 2]}, title="stored")) | {"text/plain": "[live panel; knobs: world size]"}
    return nbformat.v4.new_output("execute_result", data, execution_count=1)


def test_w01_w09_reopened_and_untrusted_the_picture_shows(lab, page):
    output = stored_output()
    lab.write("stored.ipynb", "panel", outputs=[output])
    page.open(lab, "stored.ipynb")
    page.page.locator(".jp-OutputArea-output img").wait_for()
    [source] = page.sources()
    assert base64.b64decode(source.partition(",")[2]) == base64.b64decode(output.data["image/png"])
    assert page.page.get_by_text("Error displaying widget").count() == 0
    assert page.page.locator(".jp-OutputArea-output script").count() == 0


def test_w07_without_the_widget_manager_the_picture_shows(start_lab, page):
    other = start_lab(disabledExtensions={"@jupyter-widgets/jupyterlab-manager": True})
    page.benign = {
        "anywidget": "it needs the widget manager",
        "Exception opening new comm": "the kernel's widgets find no manager, as meant here",
    }
    other.write("panel.ipynb", SETUP, PANEL)
    page.open(other, "panel.ipynb")
    page.run_all()
    assert page.failures() == []
    [source] = page.sources()
    assert source.startswith("data:image/png;base64,")
    assert page.page.get_by_role("button", name="Stop").count() == 0


def test_every_knob_has_a_name_and_every_picture_words(lab, page):
    lab.write(
        "names.ipynb",
        "from d2l_utils.widgets import BatchPanel, CollectiveExplorer\nBatchPanel()",
        "CollectiveExplorer(world_size=2, world_sizes=(1, 2))",
    )
    page.open(lab, "names.ipynb")
    page.run_all()
    assert page.failures() == []
    outputs = page.page.locator(".jp-OutputArea-output")
    for label in ("micro batch", "ranks", "accumulation", "I want", "on ranks", "world size", "collective"):
        assert outputs.get_by_label(label, exact=True).count() == 1, label
    assert outputs.get_by_role("img", name="global batch").count() == 1
    assert outputs.get_by_role("img", name="boxes before and after a collective").count() == 1
    unnamed = outputs.locator("button, input, select, textarea").evaluate_all(
        "controls => controls.filter(c => !(c.labels?.length || c.innerText.trim() || c.ariaLabel)).length"
    )
    assert unnamed == 0


def test_batch_panel_answers_in_both_directions(lab, page):
    lab.write("batch.ipynb", "from d2l_utils.widgets import BatchPanel\nBatchPanel()")
    page.open(lab, "batch.ipynb")
    page.run_all()
    [before] = page.sources()
    page.page.get_by_text("512 on 6 ranks: none, 6 does not divide 512; nearest: 510 and 516").wait_for()
    page.page.get_by_label("on ranks", exact=True).fill("8")
    page.page.keyboard.press("Enter")
    page.page.get_by_text("512 on 8 ranks: 7 ways").wait_for()
    assert page.page.locator(".jp-OutputArea-output table tr").count() == 8
    page.page.get_by_label("micro batch", exact=True).fill("2")
    page.page.keyboard.press("Enter")
    page.until(lambda: page.sources() != [before], why="the batch is redrawn")


def test_collective_explorer_draws_what_the_ranks_returned(lab, page):
    lab.write(
        "collectives.ipynb",
        "from d2l_utils.widgets import CollectiveExplorer\n"
        "panel = CollectiveExplorer('all_gather', world_size=2, world_sizes=(1, 2, 3))\npanel",
        "print(panel.result)",
    )
    page.open(lab, "collectives.ipynb")
    page.run_all()
    [before] = page.sources()
    page.page.get_by_label("collective", exact=True).select_option("reduce_scatter")
    page.until(lambda: page.sources() != [before], why="the boxes are redrawn")
    page.page.get_by_text("showing: world size = 2, collective = reduce_scatter").wait_for()
    page.run_cell(1)
    page.page.get_by_text("'before': [[10, 11], [20, 21]], 'after': [[30], [32]]").wait_for()
