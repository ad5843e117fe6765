"""The stored notebooks are what their text says, and keep every rule (cases.md N02, N06, W01, W09)."""

import html
import re
from pathlib import Path

import pytest

from d2l_utils.notebooks.builder import check, read_notebook, sections
from d2l_utils.notebooks.rules import without_words

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


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.stem)
def test_every_picture_has_its_words_in_html_made_by_nbconvert(section: Path) -> None:
    from nbconvert import HTMLExporter

    notebook = read_notebook(ROOT / "notebooks" / f"{section.stem}.ipynb")
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    # The template that reads alternative texts; the one called lab, nbconvert's default, reads none as of 7.17.
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
    images = re.findall(r"<img\b[^>]*data:image/png[^>]*>", page.replace("\n", " "))
    told = [html.unescape(words) for image in images for words in re.findall(r'\balt="([^"]*)"', image)]
    assert told == [output.metadata["image/png"]["alt"] for output in pictures]
    assert "No description has been provided" not in page


def test_pictures_of_the_readme_have_words() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"!\[[^\]]", readme)
    assert not without_words(readme)
