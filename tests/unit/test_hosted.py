"""The lessons in other people's notebook services: the cell that installs, and what VS Code and Colab read."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from d2l_utils.notebooks.builder import read_notebook
from d2l_utils.notebooks.form import HOSTED, tags
from d2l_utils.notebooks.hosted import CELL, SOURCE

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
# What a front end shows of an output that offers several kinds; all of them know these.
SHOWN = {"text/plain", "image/png"}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """place(missing, colab, source) -> the pip commands that the cell ran there."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    find = importlib.util.find_spec

    def run(missing: bool, colab: bool, source: str | None) -> list[list[str]]:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing else find(name))
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
        if source is not None:
            monkeypatch.setenv("D2L_SOURCE", source)
        try:
            exec(CELL, {})
        finally:
            monkeypatch.setattr(importlib.util, "find_spec", find)
        return commands

    monkeypatch.delenv("D2L_SOURCE", raising=False)
    return run


@pytest.mark.parametrize("colab", [False, True])
def test_where_the_package_is_the_cell_does_nothing(
    place: Any, colab: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place(missing=False, colab=colab, source="chapter.whl") == []
    assert capsys.readouterr() == ("", "")


def test_on_colab_it_installs_and_says_so(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert place(missing=True, colab=True, source="chapter.whl") == [
        [sys.executable, "-m", "pip", "install", "-q", "chapter.whl"]
    ]
    assert capsys.readouterr().out == "Installing chapter.whl\n"


def test_a_reader_s_own_machine_is_left_alone(place: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="`make lab`"):
        place(missing=True, colab=False, source="chapter.whl")


@pytest.mark.skipif(bool(SOURCE), reason="the project has an address")
def test_without_an_address_it_says_what_to_set(place: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="D2L_SOURCE"):
        place(missing=True, colab=True, source=None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_opens_elsewhere(path: Path) -> None:
    notebook = read_notebook(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [HOSTED in tags(cell) for cell in code] == [True] + [False] * (len(code) - 1) if code else True
    for output in (output for cell in code for output in cell.outputs if "data" in output):
        assert "text/plain" in output.data and set(output.data) <= SHOWN
