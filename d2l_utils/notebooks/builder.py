"""Builds notebooks from MyST Markdown: runs every cell, normalises, stores the result with its outputs.

A section is one file, `NN-name.md`, that becomes `notebooks/NN-name.ipynb`. `+++` on a line of its own
divides two Markdown cells. A code cell and its tags (see `form`):

    ```{code-cell} python
    :tags: [world-size]
    print(run.world_size)
    ```
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d2l_utils.notebooks.form import WIDGET_VIEW, normalise, tags
from d2l_utils.notebooks.hosted import with_hosted, without_hosted
from d2l_utils.notebooks.rules import disagreements, problems

_CELL_TIMEOUT = 300  # seconds


class BuildError(Exception):
    """A section that cannot become a notebook. The message names the section and the cell, and shows it."""


def sections(folder: Path) -> list[Path]:
    """The section files of a folder, in reading order."""
    return sorted(folder.glob("[0-9][0-9]-*.md"))


def read_section(path: Path) -> Any:
    """A section as a notebook that has not been run, in normal form."""
    import jupytext

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="md:myst")
    normalise(notebook)
    return notebook


def read_notebook(path: Path) -> Any:
    """A stored notebook."""
    import nbformat

    return nbformat.read(path, as_version=4)


def new_kernel() -> Any:
    """A manager for a kernel of this very Python, whatever a user's own kernel called python3 points to."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    # Encrypted, because a kernel otherwise warns on stderr that its TCP ports could be listened to.
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython(), transport_encryption="auto")


def execute(
    notebook: Any,
    folder: Path,
    *,
    name: str,
    environ: Mapping[str, str] | None = None,
    kernel: Any = None,
) -> None:
    """Runs every cell, in place, in a fresh kernel, which is gone when this returns or raises.

    Args:
        notebook: an nbformat 4 notebook.
        folder: the kernel's working directory: where the notebook is or will be stored.
        name: what messages call the notebook.
        environ: the kernel's environment; by default this process's without the D2L_ settings, which would
            change a lesson's output, and without GPUs, so that every machine builds the same numbers.
        kernel: a manager from `new_kernel` whose running kernel is used instead, and left running.

    Raises:
        BuildError: a cell raised without the tag raises-exception, wrote to stderr, showed a widget without a
            picture, took too long, or killed its kernel.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    if environ is None:
        own = {key: value for key, value in os.environ.items() if not key.startswith("D2L_")}
        environ = own | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    running: dict[str, Any] = {"cell": None, "cell_index": 0}
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=_CELL_TIMEOUT,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=lambda **what: running.update(what),
    )
    if kernel is None:
        client.km = new_kernel()  # set, not passed: a client ends only the kernels that it owns
    try:
        client.execute(env=dict(environ))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        detail = getattr(error, "traceback", "") or str(error)
        raise BuildError(_about(name, running["cell_index"], running["cell"], detail)) from None
    finally:
        if kernel is not None and client.kc is not None:
            client.kc.stop_channels()
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise BuildError(_about(name, number, cell, f"wrote to stderr:\n{output.text}"))
            data = output.get("data", {})
            if WIDGET_VIEW in data and "image/png" not in data:
                raise BuildError(
                    _about(name, number, cell, "shows a widget that has no PNG for readers without a kernel")
                )


def build(section: Path, target: Path, root: Path) -> bool:
    """Runs a section and stores it as a notebook; says whether the file changed.

    Args:
        section: the MyST Markdown file.
        target: the .ipynb file, replaced in one step, and only by a notebook that keeps every rule.
        root: the checkout.

    Raises:
        BuildError: see `execute`; or a rule of `rules` is broken.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    notebook = read_section(section)
    execute(notebook, target.parent, name=section.name)
    return _store(notebook, section, target, root)


def renew_text(section: Path, target: Path, root: Path) -> bool:
    """Stores a section's text around the outputs that its notebook holds, running nothing; says whether it changed.

    Args:
        section: the MyST Markdown file.
        target: its .ipynb file.
        root: the checkout.

    Raises:
        BuildError: the notebook does not exist; a code cell or its tags were changed, added, removed or moved,
            so that the outputs would belong to other code; or a rule of `rules` is broken.
    """
    if not target.exists():
        raise BuildError(f"{section.name}: {target.name} was never built; build it")
    notebook = read_section(section)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    stored = [cell for cell in without_hosted(read_notebook(target)).cells if cell.cell_type == "code"]
    if len(cells) != len(stored):
        raise BuildError(f"{section.name}: the text has {len(cells)} code cells, the notebook {len(stored)}; build it")
    for number, (cell, ran) in enumerate(zip(cells, stored, strict=True), start=1):
        if (cell.source, tags(cell)) != (ran.source, tags(ran)):
            raise BuildError(_about(section.name, number, cell, "is not the code cell that ran; build the lesson"))
        cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
    return _store(notebook, section, target, root)


def _store(notebook: Any, section: Path, target: Path, root: Path) -> bool:
    import nbformat

    normalise(with_hosted(notebook), root)
    if wrong := problems(notebook):  # not the links: the next lesson may not be built yet
        raise BuildError("\n".join(f"{section.name}: {problem}" for problem in wrong))
    content = nbformat.writes(notebook) + "\n"
    if target.exists() and target.read_text(encoding="utf-8") == content:
        return False
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(content, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return True


def check(section: Path, target: Path) -> list[str]:
    """What is wrong with a stored notebook, without running it: rules broken, differences from its text."""
    if not target.exists():
        return [f"{target.name} was never built"]
    stored, text = read_notebook(target), with_hosted(read_section(section))
    normalise(text)
    return disagreements(text, stored) + problems(stored, target.parent)


def _about(name: str, number: int, cell: Any, what: str) -> str:
    source = "\n".join(f"    {line}" for line in cell.source.splitlines()) if cell else ""
    return f"{name}, cell {number}:\n{source}\n{what}"
