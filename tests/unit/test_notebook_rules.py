"""Every rule of stored notebooks refuses what it should, and lets pass what it should (cases.md N01, N02, N06, W01, W09)."""

from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from d2l_utils.notebooks.form import WIDGET_VIEW, normalise
from d2l_utils.notebooks.rules import disagreements, problems


def printed(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def shown(data: dict[str, str]) -> Any:
    return new_output("display_data", data=data)


def code(source: str = "print(4)", *outputs: Any, tags: tuple[str, ...] = ()) -> Any:
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, outputs=list(outputs or [printed("4")]), metadata=metadata)


def found(*cells: Any, folder: Path | None = None) -> list[str]:
    """The problems of a notebook of these cells, run in order, without where they are."""
    notebook = new_notebook(cells=[*cells, code()])
    normalise(notebook)
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    return [problem.rpartition("): ")[2] for problem in problems(notebook, folder)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("saved /home/ann/run.py", "an absolute path"),
        ("in /tmp", "an absolute path"),
        ("['/opt/x/y.py']", "an absolute path"),
        ("~/notes/a.txt", "an absolute path"),
        ("C:\\Users\\ann", "an absolute path"),
        ("<object at 0x7f3a5c0d2e80>", "a memory address"),
        ("listening on 127.0.0.1:29500", "a port"),
        ("MASTER_PORT port=29500", "a port"),
        ("pid 4711", "a process id"),
        ("process id: 31337", "a process id"),
        ("took 12 ms", "a timing"),
        ("took 1.25 s", "a timing"),
        ("3.5 seconds", "a timing"),
        ("1200 samples/s", "a timing"),
        ("at 12:30:59", "a time of day"),
    ],
)
def test_n06_unstable_output_is_refused_where_it_is_compared(text: str, what: str) -> None:
    for output in (printed(text), shown({"text/plain": text})):
        (problem,) = found(code("x", output))
        assert problem.startswith(f"a compared output holds {what}")
        (problem,) = found(code("x", output, tags=("world-size",)))
        assert problem.startswith(f"a compared output holds {what}")
        assert found(code("x", output, tags=("nbval-ignore-output",))) == []
    error = new_output("error", ename="E", evalue=text, traceback=[text])
    (problem,) = found(code("x", error, tags=("raises-exception",)))
    assert problem.startswith(f"a compared output holds {what}")


@pytest.mark.parametrize(
    "text",
    [
        "rank 3 of 4: loss 5.541, 24.67 MB, 1/4 of the whole",
        "forward/backward, P + G + O/N, 2(N-1)/N",
        "torch.Size([4, 64]) float32 0x1F 1.0 s_r",
        "timed out after 5 seconds; ranks 1, 2 did not join",
        "notebooks/01-one.ipynb d2l_utils/launch.py",
        "processes 4, process group of 4, 16 samples a step",
        "ratio 4:2, batch 8 x 4 x 16 = 512",
    ],
)
def test_stable_output_passes(text: str) -> None:
    assert found(code("x", printed(text))) == []


def test_n01_stderr_is_refused_even_where_nothing_is_compared() -> None:
    (problem,) = found(code("x", printed("careful", "stderr"), tags=("nbval-ignore-output",)))
    assert problem == "wrote to stderr: careful"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"text/plain": "Panel", WIDGET_VIEW: "{}", "image/png": "eA=="}, None),  # normalise takes the view away
        (
            {"text/plain": "x", "image/svg+xml": "<svg/>"},
            "an output has no PNG, so GitHub and an untrusted JupyterLab show nothing",
        ),
        (
            {"text/plain": "x", "text/html": "<script>1</script>"},
            "an output has no PNG, so GitHub and an untrusted JupyterLab show nothing",
        ),
        ({"text/plain": "x", "text/html": "<table></table>"}, None),
    ],
)
def test_w09_every_picture_has_a_png_and_a_text(data: dict[str, str], problem: str | None) -> None:
    assert found(code("x", shown(data))) == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"image/png": "eA=="}, None),
        ({"image/png": "eA==", "text/plain": "<Figure size 640x480 with 1 Axes>"}, "<Figure"),
    ],
)
def test_a_stored_picture_without_an_alternative_text_is_refused(data: dict[str, str], told: str | None) -> None:
    problem = [problem for problem in found(code("x", shown(data))) if "no alternative text" in problem]
    assert len(problem) == 1 and str(told) in problem[0]
    notebook = new_notebook(cells=[code("x", shown({"image/png": "eA==", "text/plain": "[figure: curves]"}))])
    assert any("no alternative text: image/png has None" in problem for problem in problems(notebook)), "not normalised"


@pytest.mark.parametrize(
    ("source", "silent"),
    [
        ("![](images/a.png)", True),
        ("![ ](images/a.png)", True),
        ("![Two ranks](images/a.png)", False),
        ("[](a.ipynb)", False),
        ('<img src="images/a.png">', True),
        ('<img alt="" src="images/a.png">', True),
        ("<img src='images/a.png' alt='Two ranks'>", False),
    ],
)
def test_a_picture_in_prose_needs_an_alternative_text(source: str, silent: bool) -> None:
    assert found(new_markdown_cell(source)) == ["holds a picture without an alternative text"] * silent


def test_w01_a_stored_widget_view_is_refused() -> None:
    notebook = new_notebook(cells=[code("x", shown({"text/plain": "Panel", WIDGET_VIEW: "{}", "image/png": "eA=="}))])
    assert any("stores a widget view without its state" in problem for problem in problems(notebook))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("%matplotlib inline", "not plain Python"),
        ("!ls", "not plain Python"),
        ("x?", "not plain Python"),
        ("for", "not plain Python"),
        ("figure;", "ends in a semicolon"),
        ("open('https://example.com')", "names a URL"),
        ("import sys\nsys.path.append('..')", "edits sys.path"),
        ("x = 1\n" * 17, "17 lines, more than 16"),
    ],
)
def test_code_that_a_lesson_may_not_hold(source: str, problem: str) -> None:
    (line,) = found(code(source))
    assert line.startswith(problem)


def test_code_that_a_lesson_may_hold() -> None:
    assert found(code("x = 1\n\n" * 16), code("await later()"), code("print('% ! ?')")) == []
    assert found(code("x = 1\n" * 60, tags=("full-program",))) == []
    assert len(found(code("x\n" * 60, tags=("full-program",)), code("y\n" * 60, tags=("full-program",)))) == 1


def test_an_unknown_tag_is_refused() -> None:
    (problem,) = found(code("x", tags=("nbval-ignore-outputs",)))
    assert problem.startswith("unknown tags ['nbval-ignore-outputs']")


def test_an_error_must_be_meant() -> None:
    error = new_output("error", ename="E", evalue="why", traceback=[])
    assert found(code("x", error)) == ["stores an error without the tag raises-exception"]
    assert found(code("x", error, tags=("nbval-ignore-output",))) == [
        "stores an error without the tag raises-exception"
    ]
    assert found(code("x", error, tags=("raises-exception",))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("![a](https://example.com/a.png)", "fetches something from the network"),
        ("<img alt='a' src='http://example.com/a.png'>", "fetches something from the network"),
        ("<script>1</script>", "holds HTML that GitHub and an untrusted JupyterLab drop"),
        ("```{note}\nhi\n```", "holds a MyST directive, which Jupyter shows as code"),
        (":::{note}\nhi\n:::", "holds a MyST directive, which Jupyter shows as code"),
        ("[next](02-gone.ipynb)", "links to 02-gone.ipynb, which does not exist"),
    ],
)
def test_prose_that_a_lesson_may_not_hold(tmp_path: Path, text: str, problem: str) -> None:
    assert found(new_markdown_cell(text), folder=tmp_path) == [problem]


def test_prose_that_a_lesson_may_hold(tmp_path: Path) -> None:
    (tmp_path / "01-here.ipynb").touch()
    text = "[next](01-here.ipynb#part), [paper](https://example.com), [below](#part), $N$\n```\n{x}\n```"
    assert found(new_markdown_cell(text), folder=tmp_path) == []


@pytest.mark.parametrize("counts", [[None, None], [1, None], [2, 1], [1, 3], [1, 1]])
def test_every_cell_was_run_once_in_order(counts: list[int | None]) -> None:
    cells = [code(), code("x")]
    for cell, count in zip(cells, counts, strict=True):
        cell.execution_count = count
    notebook = new_notebook(cells=cells)
    normalise(notebook)
    assert problems(notebook) == [f"cells were not each run once, in order: execution counts {counts}"]


def test_a_notebook_without_outputs_compares_nothing() -> None:
    cell = new_code_cell("x", execution_count=1)
    notebook = new_notebook(cells=[cell])
    normalise(notebook)
    assert problems(notebook) == ["no output is compared"]


def test_n02_another_kernel_is_refused() -> None:
    notebook = new_notebook(cells=[code()], metadata={"kernelspec": {"name": "conda-env-x-py", "display_name": "x"}})
    notebook.cells[0].execution_count = 1
    assert problems(notebook) == ["the kernel is 'conda-env-x-py', not 'python3'"]


def test_size_is_limited() -> None:
    assert found(code("x", printed("y" * 1_000_001))) == ["1.0 MB, more than 1"]


def test_text_and_notebook_must_agree() -> None:
    def notebook(*cells: Any) -> Any:
        made = new_notebook(cells=list(cells))
        normalise(made)
        return made

    text = notebook(new_markdown_cell("# Title"), code("x"))
    assert disagreements(text, notebook(new_markdown_cell("# Title"), code("x", printed("other")))) == []
    assert disagreements(text, notebook(new_markdown_cell("# Title"))) == ["the text has 2 cells, the notebook 1"]
    assert disagreements(text, notebook(new_markdown_cell("# Title"), code("y"))) == [
        "cell 1 (x): source differs from the text"
    ]
    assert disagreements(text, notebook(new_markdown_cell("# Title"), code("x", tags=("solution",)))) == [
        "cell 1 (x): metadata differs from the text"
    ]
    saved = notebook(new_markdown_cell("# Title"), code("x"))
    saved.metadata.language_info["version"] = "3.12.1"
    assert disagreements(text, saved) == ["the notebook's metadata differ from what a build writes"]
