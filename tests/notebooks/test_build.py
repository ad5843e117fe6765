"""The builder, with tiny sections and real kernels."""

import json
import textwrap
from pathlib import Path

import nbformat
import psutil
import pytest

from d2l_utils.notebooks.__main__ import main
from d2l_utils.notebooks.builder import BuildError, build, check, read_notebook, renew_text
from d2l_utils.notebooks.form import HOSTED, tags
from d2l_utils.notebooks.hosted import without_hosted

HEAD = """
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A lesson
"""


class Book:
    """A checkout with one section."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.section = root / "chapter" / "sections" / "01-lesson.md"
        self.notebook = root / "notebooks" / "01-lesson.ipynb"
        self.section.parent.mkdir(parents=True)

    def write(self, *cells: str, tags: str = "") -> None:
        options = f":tags: [{tags}]\n" if tags else ""
        fenced = [f"```{{code-cell}} python\n{options}{textwrap.dedent(cell).strip()}\n```\n" for cell in cells]
        self.section.write_text("\n".join([HEAD.lstrip(), *fenced]), encoding="utf-8")

    def build(self) -> bool:
        return build(self.section, self.notebook, self.root)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def kernels() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if any("ipykernel" in word for word in child.cmdline())]


def test_the_same_text_gives_the_same_file(book: Book, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the environment asks for, and whatever a user's own kernel called python3 points to."""
    monkeypatch.setenv("D2L_WORLD_SIZE", "2")
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    book.write(
        """
        import os
        print(os.environ.get("D2L_WORLD_SIZE"), os.path.basename(os.getcwd()))
        """,
        "6 * 7",
    )
    assert book.build()
    first = book.notebook.read_bytes()
    assert not book.build()
    assert book.notebook.read_bytes() == first
    cells = without_hosted(read_notebook(book.notebook)).cells
    assert cells[0].source == "# A lesson"
    assert cells[1].outputs[0].text == "None notebooks\n"
    assert cells[2].outputs[0].data == {"text/plain": "42"}
    assert [cell.execution_count for cell in cells[1:]] == [1, 2]
    assert check(book.section, book.notebook) == []
    book.write("1")
    assert check(book.section, book.notebook) != []


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("print(1)\n1 / 0", "ZeroDivisionError"),
        ("import os\nos._exit(3)", "Kernel died"),
        ("import warnings\nwarnings.warn('careful')", "UserWarning: careful"),
        ("import ipywidgets\nipywidgets.IntSlider()", "a widget that has no PNG"),
        ("print(object())", "a memory address"),
    ],
)
def test_a_cell_that_may_not_be_stored_leaves_the_old_notebook(book: Book, cell: str, message: str) -> None:
    book.notebook.parent.mkdir()
    book.notebook.write_text("old")
    book.write("print('before')", cell)
    with pytest.raises(BuildError) as caught:
        book.build()
    assert message in str(caught.value)
    assert str(caught.value).startswith("01-lesson.md")
    assert cell.splitlines()[0] in str(caught.value)
    assert book.notebook.read_text() == "old"
    assert [path.name for path in book.notebook.parent.iterdir()] == ["01-lesson.ipynb"]
    assert kernels() == []


def test_an_error_that_is_meant_is_stored(book: Book) -> None:
    book.write("raise ValueError('why')", tags="raises-exception")
    assert book.build()
    (output,) = read_notebook(book.notebook).cells[-1].outputs
    assert (output.ename, output.evalue) == ("ValueError", "why")


def test_text_is_renewed_around_outputs_that_stay(book: Book) -> None:
    with pytest.raises(BuildError, match="never built"):
        renew_text(book.section, book.notebook, book.root)
    book.write("import time\ntime.time_ns()", tags="nbval-ignore-output")
    book.section.write_text(book.section.read_text() + "\n```{code-cell} python\nprint(2)\n```\n")
    book.build()
    (_, hosted, *ran) = read_notebook(book.notebook).cells
    assert not renew_text(book.section, book.notebook, book.root)
    book.section.write_text(book.section.read_text().replace("# A lesson", "# Another\n\n+++\n\nMore."))
    assert renew_text(book.section, book.notebook, book.root)
    title, more, again, *kept = read_notebook(book.notebook).cells
    assert (title.source, more.source) == ("# Another", "More.")
    assert again == hosted and kept == ran  # the clock did not move: nothing was run
    assert check(book.section, book.notebook) == []


def test_the_cell_for_hosted_notebooks_is_the_builders_own(book: Book) -> None:
    """It comes before the first code, is not run here, and is put in by renewing the text of a lesson without it."""
    book.write("print(1)")
    book.build()
    built = book.notebook.read_bytes()
    _, hosted, cell = read_notebook(book.notebook).cells
    assert HOSTED in tags(hosted) and (hosted.execution_count, hosted.outputs) == (None, [])
    assert cell.execution_count == 1
    nbformat.write(without_hosted(read_notebook(book.notebook)), book.notebook)
    assert check(book.section, book.notebook) != []
    assert renew_text(book.section, book.notebook, book.root)
    assert book.notebook.read_bytes() == built
    book.section.write_text(HEAD.lstrip())
    assert book.build()
    assert [cell.cell_type for cell in read_notebook(book.notebook).cells] == ["markdown"]


def test_text_is_not_renewed_around_other_code(book: Book) -> None:
    book.write("print(1)", "print(2)")
    book.build()
    stored = book.notebook.read_bytes()
    for cells, marks, message in (
        (["print(1)", "print(3)"], "", r"cell 2:\n    print\(3\)\nis not the code cell that ran"),
        (["print(2)", "print(1)"], "", "cell 1:"),
        (["print(1)", "print(2)"], "world-size", "cell 1:"),
        (["print(1)"], "", "the text has 1 code cells, the notebook 2"),
    ):
        book.write(*cells, tags=marks)
        with pytest.raises(BuildError, match=message):
            renew_text(book.section, book.notebook, book.root)
    assert book.notebook.read_bytes() == stored


def test_the_command_line(book: Book, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(book.root)
    book.write("print(1)")
    assert main(["check"]) == 1
    assert capsys.readouterr().out == "01-lesson: 01-lesson.ipynb was never built\n"
    assert main(["build", "01"]) == 0
    assert capsys.readouterr().out.startswith("01-lesson: built")
    assert main(["text", "01"]) == 0
    assert capsys.readouterr().out.startswith("01-lesson: unchanged")
    assert main(["check", "01-lesson.md"]) == 0
    (book.root / "notebooks" / "02-extra.ipynb").write_text("{}")
    assert main(["check"]) == 1
    assert capsys.readouterr().out == "01-lesson: ok\n01-lesson: ok\n02-extra: a notebook without a section\n"
    with pytest.raises(SystemExit, match="begins with '07'"):
        main(["build", "07"])
