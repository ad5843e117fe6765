"""Notebooks that come back from Colab, VS Code or JupyterLab make a book, or the message names the cell (X31)."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d2l_utils.book.pages import page

ROOT = Path(__file__).parents[2]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
INTRINSIC = "application/vnd.google.colaboratory.intrinsic+json"
VIEW = "application/vnd.jupyter.widget-view+json"
TABLE = """<div id="df-1" class="colab-df-container"><table><tr><td>a</td></tr></table>
<button class="colab-df-convert" onclick="convertToInteractive('df-1')"></button>
<script>google.colab.kernel.accessAllowed</script></div>"""


def out(metadata: Any = None, **data: Any) -> dict[str, Any]:
    names = {
        "plain": "text/plain",
        "png": "image/png",
        "page": "text/html",
        "svg": "image/svg+xml",
        "js": "application/javascript",
    }
    names |= {"intrinsic": INTRINSIC, "view": VIEW, "latex": "text/latex", "plotly": "application/vnd.plotly.v1+json"}
    return {
        "output_type": "display_data",
        "data": {names[name]: content for name, content in data.items()},
        "metadata": metadata or {},
    }


def colab(*outputs: dict[str, Any], source: str = "x", **metadata: Any) -> dict[str, Any]:
    """A code cell as Colab writes it."""
    own = {
        "id": "Qy-3kf0a_W9x",
        "outputId": "6f0f7d0e-5a30-4ac1-b2d8-2f0ac33b8ee7",
        "colab": {"base_uri": "https://localhost:8080/", "height": 35},
        "executionInfo": {"status": "ok", "timestamp": 1790000000000, "user_tz": -120, "elapsed": 12},
    }
    return {
        "cell_type": "code",
        "source": [source],
        "execution_count": 1,
        "outputs": list(outputs),
        "metadata": own | metadata,
    }


def prose(*lines: str, **more: Any) -> dict[str, Any]:
    return {
        "cell_type": "markdown",
        "source": "\n".join(lines),
        "metadata": {"id": "view-in-github", "colab_type": "text"},
    } | more


def write(folder: Path, *cells: dict[str, Any], name: str = "00-back.ipynb", minor: int = 0, **metadata: Any) -> Path:
    """A notebook as Colab saves it: nbformat 4.0, no ids, no lexer."""
    own = {
        "colab": {"provenance": [], "gpuType": "T4"},
        "accelerator": "GPU",
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python"},
        "widgets": {
            "application/vnd.jupyter.widget-state+json": {"a1": {"model_name": "IntSliderModel"}}
        },  # no "state"
    }
    path = folder / name
    notebook = {"nbformat": 4, "nbformat_minor": minor, "metadata": own | metadata, "cells": list(cells)}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def read(tmp_path: Path, *cells: dict[str, Any], **options: Any) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The cells that Sphinx gets, what is lost, and what is left out."""
    path = write(tmp_path, *cells, **options)
    made = page(path, [path])
    return json.loads(made.source)["cells"], made.lost, made.left_out


@pytest.mark.parametrize(
    ("output", "kind", "shown"),
    [
        (out(intrinsic={"type": "string"}, plain="'a'"), "text/plain", "'a'"),
        (out(intrinsic={"type": "dataframe"}, page=TABLE, plain="   0\n0  a"), "text/plain", "   0\n0  a"),
        (out(page="<table><tr><td>a</td></tr></table>", plain="a"), "text/html", "<table><tr><td>a</td></tr></table>"),
        (out(view={"model_id": "a1"}, plain="IntSlider(value=0)"), "text/plain", "IntSlider(value=0)"),
        (out(png=PNG), "text/html", 'alt="A picture drawn by the cell that begins with: plot(&quot;a&quot;)"'),
        (out(png=PNG, plain="<Figure size 640x480 with 1 Axes>"), "text/html", "that begins with: plot("),
        (out({"image/png": {"alt": "Loss falls."}}, png=PNG), "text/html", 'alt="Loss falls."'),
        (out({"needs_background": "light"}, png=[PNG, "\n"], plain=["[figure: curves]"]), "text/html", 'alt="Figure: curves."'),
        (out(svg="<svg xmlns='http://www.w3.org/2000/svg'/>", plain="[figure: a]"), "text/html", "src=\"data:image/svg+xml;base64,"),
        (out(view={}, png=PNG, plain="[a; knobs: b]"), "text/html", "<figcaption>In JupyterLab this panel is live. Knobs: b."),
        (out(plotly={"data": []}, page="<script src='https://cdn.plot.ly/x.js'></script>", png=PNG), "text/html", "<img"),
    ],
)  # fmt: skip
def test_a_page_shows_what_it_knows_of_an_output(tmp_path: Path, output: Any, kind: str, shown: str) -> None:
    cells, lost, left_out = read(tmp_path, prose("# Back"), colab(output, source='plot("a")'))
    (kept,) = cells[1]["outputs"]
    assert list(kept["data"]) == [kind] and shown in "".join(kept["data"][kind])
    assert (lost, left_out) == ([], [])


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (out(plotly={"data": []}), "application/vnd.plotly.v1+json"),
        (out(intrinsic={"type": "dataframe"}), INTRINSIC),
        (out(page="<iframe src='x'></iframe>"), "text/html"),
        (out(page="<img src='https://example.com/a.png'>", plain="<IPython.core.display.HTML object>"), "text/html"),
    ],
)
def test_what_a_reader_would_miss_is_named_with_its_cell(tmp_path: Path, output: Any, what: str) -> None:
    _, lost, left_out = read(tmp_path, prose("# Back"), colab(), colab(output))
    assert (lost, left_out) == ([f"00-back.ipynb, cell 3: cannot show {what}"], [])


def test_a_script_is_no_loss(tmp_path: Path) -> None:
    script = out(js="go()", plain="<IPython.core.display.Javascript object>")
    _, lost, left_out = read(tmp_path, prose("# Back"), colab(script, out(view={"model_id": "a1"})))
    assert lost == []
    kinds = ("application/javascript", "a widget without picture or text")
    assert left_out == [f"00-back.ipynb, cell 2: cannot show {kind}" for kind in kinds]


def test_a_kind_that_is_shown_as_its_text_is_named(tmp_path: Path) -> None:
    cells, lost, left_out = read(
        tmp_path, prose("# Back"), colab(out(plotly={"data": []}, plain="Figure({'data': []})"))
    )
    assert cells[1]["outputs"][0]["data"] == {"text/plain": ["Figure({'data': []})"]}
    assert (lost, left_out) == ([], ["00-back.ipynb, cell 2: shows the text of application/vnd.plotly.v1+json"])


def test_each_picture_of_a_cell_keeps_its_own_words(tmp_path: Path) -> None:
    pair = [out(png=PNG, plain=f"[figure: {name}]") for name in ("one", "two")]
    cells, *_ = read(tmp_path, prose("# Back"), colab(*pair))
    made = ["".join(output["data"]["text/html"]) for output in cells[1]["outputs"]]
    assert ['alt="Figure: one."' in made[0], 'alt="Figure: two."' in made[1]] == [True, True]


def test_pictures_in_prose_come_along_or_stay_words(tmp_path: Path) -> None:
    """Attached ones come along; a badge or a picture on another host would be fetched whenever the page is opened."""
    badge = '<a href="https://colab.research.google.com"><img src="https://colab.research.google.com/b.svg" alt="Open In Colab"/></a>'
    cells, lost, left_out = read(
        tmp_path,
        prose("# Back", badge, "![far](https://example.com/a.png)", "<img src=http://example.com/b.png>"),
        prose("![near](attachment:image.png)", attachments={"image.png": {"image/png": PNG}}),
    )
    told = "".join(cells[0]["source"])
    assert '<a href="https://colab.research.google.com">Open In Colab</a>' in told
    assert "\n[far](https://example.com/a.png)" in told and "<img" not in told
    assert "".join(cells[1]["source"]) == f"![near](data:image/png;base64,{PNG})"
    assert lost == [] and left_out == ["00-back.ipynb, cell 1: leaves out a picture from another host"] * 3


@pytest.mark.parametrize("metadata", [
    {"vscode": {"languageId": "python"}}, {"collapsed": "yes", "scrolled": 3}, {"tags": None},
    {"execution": {"iopub.status.busy": "2026-01-01T10:00:00Z"}, "jupyter": {"outputs_hidden": True}},
    {"cellView": "form", "colab_type": "code", "nbpresent": {}},
])  # fmt: skip
@pytest.mark.parametrize("cell_id", [None, "data-colab id: not what nbformat allows, and far too long, " * 2])
def test_what_editors_leave_in_a_cell_is_of_no_account(tmp_path: Path, metadata: Any, cell_id: str | None) -> None:
    cell = colab(out(plain="1"), **metadata) | ({"id": cell_id} if cell_id else {})
    cells, lost, left_out = read(tmp_path, prose("# Back"), cell, minor=5 if cell_id else 0)
    assert [output["data"] for output in cells[1]["outputs"]] == [{"text/plain": ["1"]}]
    assert cells[1]["metadata"] == {"tags": []} and (lost, left_out) == ([], [])


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ({"output_type": "stream", "text": "a"}, "'name' is a required property"),
        ({"output_type": "update_display_data", "data": {}, "metadata": {}}, "'update_display_data'"),
        ({"output_type": "error", "ename": "E", "evalue": "e"}, "'traceback' is a required property"),
    ],
)
def test_what_is_no_output_is_named_with_its_cell(tmp_path: Path, output: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=r"^00-back\.ipynb, cell 2 is not as nbformat says: ") as caught:
        read(tmp_path, prose("# Back"), colab(output))
    assert what in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"nbformat": 4, "nbformat_minor": 5}', "# a text"])
def test_what_is_no_notebook_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "00-back.ipynb"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^00-back\.ipynb"):
        page(path, [path])


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """make() -> what `make book` says of the notebooks in tmp_path."""
    if any(importlib.util.find_spec(name) is None for name in ("myst_nb", "furo", "latex2mathml")):
        message = "the book's tools are not installed: `make book` installs them"
        if os.environ.get("D2L_CI"):
            pytest.fail(message)
        pytest.skip(message)

    def run() -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "d2l_utils.book",
            "--notebooks",
            str(tmp_path),
            "--target",
            str(tmp_path / "site"),
        ]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run


def test_a_notebook_from_colab_becomes_a_page_without_a_request(make: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        prose("# Back", '<img src="https://colab.research.google.com/b.svg" alt="Open In Colab"/>'),
        prose("![near](attachment:image.png)", attachments={"image.png": {"image/png": PNG}}),
        colab(
            {"output_type": "stream", "name": "stdout", "text": ["done\n"]}, source="!pip install x  # a shell command"
        ),
        colab(out(intrinsic={"type": "dataframe"}, page=TABLE, plain="the table's text")),
        colab(out(png=PNG), out(png=PNG, plain="<Figure size 640x480 with 1 Axes>"), source="plt.plot(x)"),
        colab(out(view={"model_id": "a1"}, plain="IntSlider(value=0)"), out(js="go()"), source="%%time\nx"),
        colab(
            out(latex="$\\displaystyle x^{2}$", plain="x**2"), out(latex="$\\nonsense{N}$", plain="the formula's text")
        ),
    )
    done = make()
    said = "00-back.ipynb, cell {}: {}\n".format
    told = said(1, "leaves out a picture from another host") + said(6, "cannot show application/javascript")
    assert (done.returncode, done.stderr) == (0, told)
    text = html.unescape((tmp_path / "site" / "index.html").read_text(encoding="utf-8"))
    for words in ("Open In Colab", "done", "the table's text", "IntSlider(value=0)", "the formula's text"):
        assert words in text
    assert text.count("A picture drawn by the cell that begins with: plt.plot(x)") == 2
    assert not re.search(r"""<(?:script|img|link)[^>]*(?:src|href)=["']https?:""", text)
    images = re.findall(r"<img\b[^>]*>", text)
    assert len(images) == 3 and all(re.search(r'\balt="\w', image) for image in images)


def test_the_message_names_the_cells_of_what_would_be_lost(make: Any, tmp_path: Path) -> None:
    write(tmp_path, prose("# Back"), colab(out(plotly={"data": []})))
    write(tmp_path, prose("# More"), prose("a"), colab(out(page="<iframe></iframe>")), name="01-more.ipynb")
    done = make()
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [
            "00-back.ipynb, cell 2: cannot show application/vnd.plotly.v1+json",
            "01-more.ipynb, cell 3: cannot show text/html",
            "Give these outputs a picture or a text, or clear them.",
        ],
    )
    assert not (tmp_path / "site").exists()


def test_a_warning_of_sphinx_names_the_cell(make: Any, tmp_path: Path) -> None:
    write(tmp_path, prose("# Back"), prose("a", "", "[b](nowhere.ipynb)"))
    done = make()
    assert done.returncode == 1 and re.match(r"00-back\.ipynb, cell 2: WARNING: .*nowhere", done.stderr)
