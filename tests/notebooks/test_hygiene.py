"""The stored notebooks are what their text says, and keep every rule (cases.md N02, N06, W01, W09)."""

from pathlib import Path

import pytest

from d2l_utils.notebooks.builder import check, sections

ROOT = Path(__file__).parents[2]
SECTIONS = sections(ROOT / "chapter19_9" / "sections")
HINT = "If you ran it in JupyterLab: `git restore notebooks`. If you changed its text: `make notebooks`."


def test_every_section_has_its_notebook() -> None:
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks == [section.stem for section in SECTIONS]
    assert notebooks[:1] == ["00-start"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.stem)
def test_a_notebook_is_what_its_text_says_and_keeps_the_rules(section: Path) -> None:
    problems = check(section, ROOT / "notebooks" / f"{section.stem}.ipynb")
    assert not problems, "\n".join([*problems, HINT])
