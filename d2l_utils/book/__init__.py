"""The notebooks as a static site that opens from disk: no server, no kernel, no request to other hosts.

    python -m d2l_utils.book           from notebooks/ to build/book/; `make book` installs what it needs first

Sphinx, myst-nb and furo do the work, from the outputs that the notebooks store: nothing is run. `pages` turns what
Sphinx would leave behind (widgets, solutions, the order of the lessons) into what it knows; `maths` writes formulas as
MathML, which browsers draw by themselves.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from d2l_utils.book.pages import START, page, scripts

__all__ = ["BookError", "build"]

_HERE = Path(__file__).parent
_SETTINGS: dict[str, Any] = {
    "extensions": ["myst_nb", "d2l_utils.book.maths"],
    "root_doc": START,
    "html_theme": "furo",
    "html_math_renderer": "mathml",
    "html_permalinks": False,
    "html_copy_source": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_use_index": False,
    "html_show_search_summary": False,  # a page from disk may not fetch another
    "html_css_files": ["book.css"],
    "html_js_files": [("players.js", {"defer": "defer"})],
    "nb_execution_mode": "off",
    "nb_code_prompt_show": "Show the solution",
    "nb_code_prompt_hide": "Hide the solution",
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 3,
    # JupyterLab's own, so that a link to a heading leads to it in both.
    "myst_heading_slug_func": "d2l_utils.book.pages.anchor",
    "suppress_warnings": ["config.cache"],  # a function among the settings
    "exclude_patterns": [],
}


class BookError(Exception):
    """Sphinx had something to say: a dead link, a formula that cannot be read, a cell that cannot be shown."""


def build(notebooks: Path, target: Path) -> Path:
    """Makes the site and returns the page to open.

    Args:
        notebooks: the folder of built notebooks; the first by name becomes the start page.
        target: the site's folder: a new or empty one, or one that has a site, which only a site without a warning replaces.

    Raises:
        ValueError: there are no notebooks, one of them cannot be read, or the target has something else in it.
        BookError: an output is of a kind that no page shows; the message names its cell. Or Sphinx gave a warning or
            an error; the message is Sphinx's own.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    if not paths:
        raise ValueError(f"notebooks is {notebooks}: it must be a folder with .ipynb files")
    made = target / "_static" / "players.js"
    if target.exists() and not made.is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"target is {target}: what is there is no such site, and would be lost; give a new folder")
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    with tempfile.TemporaryDirectory(prefix="d2l-book-") as scratch:
        source, static, site = Path(scratch, "source"), Path(scratch, "static"), Path(scratch, "site")
        source.mkdir()
        static.mkdir()
        pages = {START if path == paths[0] else path.stem: page(path, paths) for path in paths}
        if lost := [line for made_page in pages.values() for line in made_page.lost]:
            raise BookError("\n".join([*lost, "Give these outputs a picture or a text, or clear them."]))
        for name, made_page in pages.items():
            (source / f"{name}.ipynb").write_text(made_page.source, encoding="utf-8")
            for line in made_page.left_out:
                print(line, file=sys.stderr)
        shutil.copy(_HERE / "book.css", static)
        (static / "players.js").write_text(scripts(_HERE / "players.js"), encoding="utf-8")
        title = _title(paths[0])
        settings = _SETTINGS | {"html_title": title, "project": title, "html_static_path": [str(static)]}
        said = StringIO()
        with docutils_namespace():
            sphinx = Sphinx(source, None, site, Path(scratch, "trees"), "html", settings, status=None, warning=said)
            sphinx.build(force_all=True)
        if said.getvalue() or sphinx.statuscode:
            raise BookError(_with_cells(said.getvalue(), source, paths))
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(site, target, ignore=shutil.ignore_patterns(".*", "_sources", "objects.inv", "*.map"))
    return target / f"{START}.html"


def _with_cells(said: str, source: Path, paths: Sequence[Path]) -> str:
    """Sphinx's messages by the notebooks' own names; myst-nb calls a place in cell 3 line 3xxxx."""
    said = re.sub(r"\x1b\[[\d;]*m", "", said).replace(f"{source}/", "").strip()
    said = re.sub(rf"^{START}\.ipynb", paths[0].name, said, flags=re.MULTILINE)
    return re.sub(r"(\.ipynb):(\d+)\d{4}\b", r"\1, cell \2", said)


def _title(path: Path) -> str:
    """A notebook's first heading."""
    from d2l_utils.notebooks.builder import read_notebook

    return str(read_notebook(path).cells[0].source).splitlines()[0].lstrip("# ")
