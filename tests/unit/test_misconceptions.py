"""Twelve misconceptions, each broken by a run in the lesson where it bites, with symptom, diagnosis and cure."""

import re
from pathlib import Path
from typing import Any

import pytest

from d2l_utils.notebooks.builder import read_section, sections

SECTIONS = {path.stem[:2]: path for path in sections(Path(__file__).parents[2] / "chapter19_9" / "sections")}

MISCONCEPTIONS = {
    "DDP saves memory.": ("04", "Break it"),
    "ZeRO-3 shrinks activations.": ("06", "Break it"),
    "FSDP2 with `False` is ZeRO-2 to the letter.": ("07", "Break it"),
    "A snapshot between steps shows the peak.": ("07", "Break it"),
    "The optimizer may be built first.": ("08", "Break it"),
    "Sharding the root is enough.": ("09", "Why block by block"),
    "Equal seeds do not matter.": ("09", "Break it"),
    "The bytes on gloo's wire are what a cluster would send.": ("10", "Break it"),
    "All stages send the same bytes.": ("10", "Break it"),
    "`no_sync` is only about backward.": ("11", "Break it"),
    "The printed loss is the global loss.": ("11", "The global batch, and whose loss is printed"),
    "More ranks always help.": ("12", "Break it"),
}
PARTS = ("Symptom", "Diagnosis", "Cure")


def under(section: Any, heading: str) -> list[Any]:
    """The cells under a heading of the second level."""
    cells, inside = [], False
    for cell in section.cells:
        if cell.cell_type == "markdown" and re.match(r"##? ", cell.source):
            inside = cell.source.startswith(f"## {heading}")
        cells += [cell] * inside
    return cells


def test_there_are_twelve() -> None:
    assert len(MISCONCEPTIONS) == 12


@pytest.mark.parametrize("claim", [claim for claim, (lesson, _) in MISCONCEPTIONS.items() if lesson in SECTIONS])
def test_a_misconception_is_run_and_has_a_symptom_and_a_cure(claim: str) -> None:
    lesson, heading = MISCONCEPTIONS[claim]
    cells = under(read_section(SECTIONS[lesson]), heading)
    assert any(cell.cell_type == "code" for cell in cells)
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert f'**"{claim}"**' in text
    after = text.split(f'**"{claim}"**')[1].split('**"')[0]
    assert [word for word in PARTS if f"**{word}**" not in after] == []
