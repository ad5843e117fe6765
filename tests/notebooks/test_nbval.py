"""Every lesson runs again, and gives what is stored: as it lies, at other world sizes, and in an awkward folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import run_sync
from nbformat.v4 import new_code_cell

from d2l_utils.device import default_world_size
from d2l_utils.notebooks.builder import BuildError, execute, new_kernel, read_notebook
from d2l_utils.notebooks.form import comparable, is_compared, normalise, tags

NOTEBOOKS = [  # with something to run: not the glossary
    path
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    if any(cell.cell_type == "code" for cell in read_notebook(path).cells)
]
STORED_WORLD_SIZE = 4
# All lessons at all sizes take as long as every other test together: .ci/run does that, a reader's `make test` does not.
OTHER_WORLD_SIZES = [1, 2, 3] if os.environ.get("D2L_CI") else [2]
# Eight ranks on two cores take long: the two lessons whose batch once did not divide by eight.
AT_EIGHT = ("07", "09") if os.environ.get("D2L_CI") else ()

each_lesson = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def environment() -> dict[str, str]:
    """This process's, in which the GPUs are hidden, with the world size that notebooks are built at; set only where the
    machine has another."""
    assert (os.environ["D2L_DEVICE"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    environ = {key: value for key, value in os.environ.items() if key != "D2L_WORLD_SIZE"}
    return environ if default_world_size() == STORED_WORLD_SIZE else environ | {"D2L_WORLD_SIZE": "4"}


@each_lesson
def test_nbval_finds_every_stored_output_again(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly, in a fresh kernel, and from another working directory (cases.md L30)."""
    monkeypatch.delenv("D2L_WORLD_SIZE", raising=False)
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120"]
    done = subprocess.run(
        [*command, "-q", "--color=no", "-p", "no:cacheprovider", str(notebook)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


class Classroom:
    """One kernel for many lessons, so that their imports are paid once, in a read-only copy of the notebooks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "课程 第 19 章 ü" / "notebooks"
        shutil.copytree(NOTEBOOKS[0].parent, self.folder, ignore=shutil.ignore_patterns(".*"))
        for path in (*self.folder.iterdir(), self.folder):
            path.chmod(path.stat().st_mode & ~0o222)
        self.kernel: Any = None

    def run(self, notebook: Any, world_size: int, name: str) -> None:
        """Runs a notebook in place, names cleared before and the world size set, and brings it into normal form."""
        if self.kernel is None:
            self.kernel = new_kernel()
            run_sync(self.kernel.start_kernel)(cwd=str(self.folder), env=dict(os.environ))
        clear = f"import os; os.environ['D2L_WORLD_SIZE'] = '{world_size}'; get_ipython().reset(new_session=True)"
        notebook.cells.insert(0, new_code_cell(clear))
        try:
            execute(notebook, self.folder, name=f"{name} at world size {world_size}", kernel=self.kernel)
        except BuildError:
            self.end()  # a cell may still be running
            raise
        del notebook.cells[0]
        normalise(notebook)

    def end(self) -> None:
        if self.kernel is not None:
            run_sync(self.kernel.shutdown_kernel)(now=True)
            self.kernel = None


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classroom]:
    room = Classroom(tmp_path_factory.mktemp("classroom"))
    yield room
    room.end()
    room.folder.chmod(0o755)


@pytest.mark.parametrize(
    ("notebook", "world_size"),
    [
        pytest.param(path, size, id=f"{path.stem}-{size}")
        for size in [*OTHER_WORLD_SIZES, 8]
        for path in NOTEBOOKS
        if size != 8 or path.name.startswith(AT_EIGHT)
    ],
)
def test_a_lesson_holds_at_other_world_sizes(notebook: Path, world_size: int, classroom: Classroom) -> None:
    """In a folder with spaces and Chinese in its name that nothing is written to (cases.md L25, L26, N06)."""
    before = sorted(classroom.folder.iterdir())
    stored = read_notebook(notebook)
    fresh = read_notebook(classroom.folder / notebook.name)
    classroom.run(fresh, world_size, notebook.stem)
    assert sorted(classroom.folder.iterdir()) == before
    differing = [
        f"{cell.source}\n--- stored: {comparable(cell)}\n--- now: {comparable(again)}"
        for cell, again in zip(stored.cells, fresh.cells, strict=True)
        if is_compared(cell) and "world-size" not in tags(cell) and comparable(again) != comparable(cell)
    ]
    assert not differing, f"differs at {world_size} ranks; is it to be tagged world-size?\n" + "\n\n".join(differing)
