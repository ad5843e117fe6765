"""The advisor's panel in JupyterLab, from the keyboard: an answer at each change, an error beside its field."""

import pytest

from .conftest import SCREENSHOTS

CELL = """from chapter19_9.choosing.panel import AdvisorPanel
AdvisorPanel(model='llama-7b', memory=80, devices=8, nodes=1)"""


@pytest.fixture
def advisor(lab, page):
    lab.write("advisor.ipynb", CELL)
    page.open(lab, "advisor.ipynb")
    page.run_all()
    page.said = page.page.locator(".jp-OutputArea pre[role=status]")
    page.said.get_by_text("Start with").wait_for()
    return page


def fill(advisor, name, text):
    """As from the keyboard: go to the field, take all of it, type, leave with Tab."""
    field = advisor.page.get_by_label(name, exact=True)
    field.focus()
    advisor.page.keyboard.press("Control+A")
    advisor.page.keyboard.type(text)
    advisor.page.keyboard.press("Tab")


def answered(advisor, before):
    """Words and pictures, when neither are those of ``before`` any more."""
    words, pictures = before
    advisor.until(lambda: advisor.said.inner_text() != words, why="the words are new")
    advisor.until(lambda: advisor.sources() != pictures, why="flow and bars are drawn anew")
    return advisor.said.inner_text(), advisor.sources()


def test_a_question_is_answered_at_each_change_and_nonsense_stands_beside_its_field(advisor):
    assert advisor.failures() == []
    first = advisor.said.inner_text(), advisor.sources()
    assert first[0].startswith("Start with ZeRO-1") and len(first[1]) == 2

    model = advisor.page.get_by_label("model", exact=True)
    model.focus()
    advisor.page.keyboard.press("Home")
    small = answered(advisor, first)
    assert model.input_value() == "gpt2" and small[0].startswith("Start with DDP")
    assert advisor.page.get_by_label("layers", exact=True).is_disabled(), "a preset's own"

    fill(advisor, "nodes", "0")
    alert = advisor.page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text().startswith("nodes is 0: it must be")
    field, shown = advisor.page.get_by_label("nodes", exact=True).bounding_box(), alert.bounding_box()
    assert abs(shown["x"] - field["x"]) < 150 and 0 < shown["y"] - field["y"] < 60, "right under its field"
    assert advisor.page.evaluate("document.activeElement.labels?.[0]?.innerText ?? ''") == "inside a node, GB/s"
    advisor.keep(SCREENSHOTS / "advisor_error.png")
    fill(advisor, "nodes", "2")
    alert.wait_for(state="detached")
    advisor.said.get_by_text("Start with").wait_for()

    before = advisor.said.inner_text(), advisor.sources()
    model.focus()
    advisor.page.keyboard.press("End")
    advisor.until(lambda: advisor.page.get_by_label("layers", exact=True).is_enabled(), why="own sizes are free")
    fill(advisor, "layers", "400")
    large = answered(advisor, before)
    assert large[0].startswith("Start with DDP (ddp)")
    advisor.page.get_by_label("checkpointing", exact=True).press("Space")
    assert answered(advisor, large)[0].startswith("Start with DDP + checkpointing")
    assert advisor.failures() == []
