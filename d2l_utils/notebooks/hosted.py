"""The cell that the builder puts before a lesson's first: on a hosted notebook it installs what the lesson needs.

Where the package is there, which is wherever notebooks are built, tested and taught, it does nothing and prints nothing.
So it is stored as not run, in all lessons alike, and no section repeats it.
"""

from typing import Any

from d2l_utils.notebooks.form import HOSTED, tags

__all__ = ["SOURCE", "with_hosted", "without_hosted"]

# What pip installs on Colab where the reader names nothing: set it when the project has an address, then
# `python -m d2l_utils.notebooks text`.
SOURCE = ""
CELL = f"""\
import importlib.util, os, subprocess, sys
if importlib.util.find_spec("d2l_utils") is None:  # otherwise this cell does nothing
    source = os.environ.get("D2L_SOURCE", {SOURCE!r})  # for pip: the chapter's address, or a wheel
    if "google.colab" not in sys.modules or not source:
        raise ModuleNotFoundError("The chapter is not installed. Here: open it with `make lab`. On Colab: set D2L_SOURCE.")
    print("Installing", source)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)"""


def with_hosted(notebook: Any) -> Any:
    """The notebook itself, with the cell before its first code cell; as it is, if it has no code."""
    import nbformat

    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            notebook.cells.insert(place, nbformat.v4.new_code_cell(CELL, metadata={"tags": [HOSTED]}))
            break
    return notebook


def without_hosted(notebook: Any) -> Any:
    """The notebook itself, without that cell."""
    notebook.cells = [cell for cell in notebook.cells if HOSTED not in tags(cell)]
    return notebook
