"""The normal form of notebooks: the same text and results give the same file."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from d2l_utils.notebooks.form import WIDGET_VIEW, cell_ids, comparable, normalise


def code(source: str, *outputs: Any, tags: tuple[str, ...] = (), count: int | None = 1) -> Any:
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, outputs=list(outputs), metadata=metadata, execution_count=count)


def stream(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> Any:
    names = {"text": "text/plain", "png": "image/png", "widget": WIDGET_VIEW, "html": "text/html"}
    return new_output("display_data", data={names[name]: content for name, content in data.items()})


def normal(*cells: Any, root: Path | None = None) -> Any:
    notebook = new_notebook(cells=list(cells))
    normalise(notebook, root)
    nbformat.validate(notebook)
    return notebook


def test_ids_depend_on_the_text_alone() -> None:
    ids = cell_ids(["a", "b", "a"])
    assert len(set(ids)) == 3
    assert cell_ids(["new", "a", "b", "a"])[1:] == ids
    assert [cell.id for cell in normal(new_markdown_cell("a"), code("b")).cells] == ids[:2]


def test_what_differs_from_run_to_run_is_dropped() -> None:
    cell = code("1", new_output("execute_result", data={"text/plain": "1"}, execution_count=9, metadata={"x": 1}))
    cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01T10:00:00Z"}
    cell.metadata["collapsed"] = True
    notebook = new_notebook(
        cells=[cell],
        metadata={
            "kernelspec": {"name": "conda-env-x-py", "display_name": "x", "language": "python"},
            "language_info": {"name": "python", "version": "3.12.1"},
            "widgets": {"application/vnd.jupyter.widget-state+json": {}},
            "jupytext": {"text_representation": {"jupytext_version": "1.19.6"}},
        },
    )
    normalise(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    assert notebook.cells[0].metadata == {}
    assert notebook.cells[0].outputs[0].execution_count == 1
    assert notebook.cells[0].outputs[0].metadata == {}


def test_normalising_twice_changes_nothing() -> None:
    notebook = normal(code("1", stream("a"), shown(text="x", png="eA=="), stream("b"), tags=("solution",)))
    once = nbformat.writes(notebook)
    normalise(notebook)
    assert nbformat.writes(notebook) == once


def test_chunks_of_a_stream_become_one() -> None:
    (cell,) = normal(code("1", stream("a\n"), shown(text="x"), stream("b\n"), stream("c\n", "stderr"))).cells
    assert [output.get("text") for output in cell.outputs] == ["a\nb\n", None, "c\n"]


@pytest.mark.parametrize(
    ("printed", "kept"),
    [("10%\r100%\n", "100%\n"), ("a\rb\rc\nd\re\n", "c\ne\n"), ("whole\r\nlines\r\n", "whole\r\nlines\r\n")],
)
def test_a_progress_bar_keeps_its_last_state(printed: str, kept: str) -> None:
    (cell,) = normal(code("1", stream(printed))).cells
    assert cell.outputs[0].text == kept


def test_a_widget_keeps_its_picture_and_text() -> None:
    (cell,) = normal(code("1", shown(widget="{}", text="Panel", png="eA=="))).cells
    assert dict(cell.outputs[0].data) == {"text/plain": "Panel", "image/png": "eA=="}


def test_an_answer_is_folded() -> None:
    cells = normal(code("1", tags=("solution",)), code("2", tags=("world-size",), count=2)).cells
    assert cells[0].metadata == {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    assert cells[1].metadata == {"tags": ["world-size"]}


def test_paths_of_the_building_machine_are_shortened_where_nothing_is_compared() -> None:
    root = Path("/course/chapter 19")
    line = f"{sys.executable} {root}/d2l_utils/a.py {root} {Path.home()}/x"
    short = "python d2l_utils/a.py . ~/x"
    error = new_output("error", ename="E", evalue=line, traceback=[line])
    ignored, compared, failing = normal(
        code("1", stream(line), shown(text=line), tags=("nbval-ignore-output",)),
        code("2", stream(line)),
        code("3", error, tags=("raises-exception",)),
        root=root,
    ).cells
    assert ignored.outputs[0].text == short
    assert ignored.outputs[1].data["text/plain"] == short
    assert compared.outputs[0].text == line  # the rules refuse it; hiding it would make nbval fail
    assert failing.outputs[0].traceback == [short]
    assert failing.outputs[0].evalue == line


def test_what_nbval_compares() -> None:
    error = new_output("error", ename="E", evalue="why", traceback=["At /somewhere"])
    (cell,) = normal(code("1", stream("a"), shown(text="x", png="eA=="), error)).cells
    assert comparable(cell) == [("stdout", "a"), ("text/plain", "x"), ("ename", "E"), ("evalue", "why")]


def test_what_a_player_needs_is_kept_and_nothing_else_of_an_outputs_metadata() -> None:
    from d2l_utils.notebooks.form import PLAYER
    from d2l_utils.widgets.stored import stored

    kept = stored("bars.js", values=[[1 / 3, 2]], title="t")
    assert kept == {PLAYER: {"module": "bars.js", "state": '{"values":[[0.33333,2]],"title":"t"}'}}
    output = nbformat.v4.new_output("display_data", {"text/plain": "t"}, metadata={**kept, "isolated": True})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("t", outputs=[output])])
    normalise(notebook)
    assert notebook.cells[0].outputs[0].metadata == kept


def test_a_picture_gets_its_outputs_text_as_alternative_text_and_keeps_its_own() -> None:
    def told(metadata: dict[str, Any], **data: str) -> Any:
        output = new_output("display_data", {"image/png": "eA==", "image/svg+xml": "<svg/>", **data}, metadata=metadata)
        (cell,) = normal(code("1", output)).cells
        return cell.outputs[0].metadata

    text = {"text/plain": "[figure: curves]"}
    assert told({}, **text) == {kind: {"alt": "Figure: curves."} for kind in ("image/png", "image/svg+xml")}
    own = {"image/png": {"alt": "Loss falls.", "width": 7}, "image/svg+xml": None}
    assert told(own, **text) == {"image/png": {"alt": "Loss falls."}, "image/svg+xml": {"alt": "Figure: curves."}}
    assert told({}) == {}
