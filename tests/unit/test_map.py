"""The start page is a map: every lesson in reading order, with its question and how long it takes; README lists them."""

import math
import re
from pathlib import Path
from typing import Any

from d2l_utils.notebooks.builder import read_section, sections
from d2l_utils.notebooks.form import tags

ROOT = Path(__file__).parents[2]
START, *LESSONS = sections(ROOT / "chapter19_9" / "sections")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def minutes(section: Any) -> int:
    """What the map says that it says: 100 words or 10 lines of code a minute, 5 for each exercise; up to the next 5."""
    words = sum(len(cell.source.split()) for cell in section.cells if cell.cell_type == "markdown")
    code = [cell for cell in section.cells if cell.cell_type == "code"]
    exercises = sum("solution" in tags(cell) for cell in code)
    lines = sum(len(cell.source.splitlines()) for cell in code if "solution" not in tags(cell))
    return 5 * math.ceil((words / 100 + lines / 10 + 5 * exercises) / 5)


def rows(text: str, folder: str) -> list[list[str]]:
    """[title, file stem, cells ...] of each line of a table that begins with a link to a notebook."""
    found = re.findall(rf"^\| \[([^\]]+)\]\({folder}([\w-]+)\.ipynb\) \| (.*) \|$", text, re.MULTILINE)
    return [[title, stem, *rest.split(" | ")] for title, stem, rest in found]


def heading(path: Path, number: int) -> str:
    """The n-th line of a section that is not empty, without marks."""
    lines = [line for line in path.read_text(encoding="utf-8").split("---\n")[-1].splitlines() if line.strip()]
    return re.sub(r"^# |\*\*", "", lines[number]).replace(r"$Y = XW^\top$", "Y = XWᵀ")


def test_the_map_has_every_lesson_with_its_question_and_its_minutes() -> None:
    found = rows(START.read_text(encoding="utf-8"), "")
    assert [stem for _, stem, *_ in found] == [path.stem for path in LESSONS]
    for path, (title, _, question, _, read, run) in zip(LESSONS, found, strict=True):
        if title.startswith("19.9"):
            assert (title, question) == (heading(path, 0), heading(path, 1))
        assert int(read) == minutes(read_section(path)), path.stem
        assert int(run) % 5 == 0


def test_a_lesson_needs_only_lessons_before_it() -> None:
    for title, _, _, needs, *_ in rows(START.read_text(encoding="utf-8"), ""):
        number = re.match(r"19\.9\.(\d+)", title)
        assert all(int(needed) < int(number[1]) for needed in re.findall(r"\d+", needs) if number)


def test_readme_lists_the_same() -> None:
    listed = [(title, stem, question) for title, stem, question, *_ in rows(README, "notebooks/")]
    assert listed == [(title, stem, question) for title, stem, question, *_ in rows(START.read_text("utf-8"), "")]
