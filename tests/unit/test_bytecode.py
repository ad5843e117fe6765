"""Where Python writes no bytecode, launches keep the chapter's in the kernel's own folder, and it is never stale."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, os, sys, time
from d2l_utils.launching.warm import keep_bytecode
keep_bytecode(sys.argv[2])
sys.path.insert(0, sys.argv[1])
import lesson
def edit(text):
    open(lesson.__file__, "w").write(text)
    del sys.modules["lesson"]
    return importlib.import_module("lesson").answer
print(lesson.answer, edit("answer = 2"), edit("answer = 3"))
import json.tool  # of Python itself, and left to it
print(json.tool.__spec__.loader.__class__.__name__)
"""


def test_bytecode_is_kept_apart_and_never_stale(tmp_path: Path) -> None:
    """Edited twice within a second, to the same length: by Python's own rule the first one's bytecode would still do."""
    source, kept = tmp_path / "course", tmp_path / "kept"
    source.mkdir()
    (source / "lesson.py").write_text("answer = 1")
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, str(source), str(kept)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["1 2 3", "SourceFileLoader"]
    assert [path.name for path in source.iterdir()] == ["lesson.py"], "nothing is written beside the sources"
    assert [path.name.partition(".")[0] for path in kept.rglob("*.pyc")] == ["lesson"]


def test_a_kernels_folder_that_is_gone_stays_gone(tmp_path: Path) -> None:
    """The kernel was killed while a rank still imported: what that keeps would stay for ever."""
    (tmp_path / "lesson.py").write_text("answer = 1")
    kernel = tmp_path / "kernel"
    program = PROGRAM.partition("import lesson\n")[0] + "import lesson\nprint(lesson.answer)"
    for kept in (kernel / "bytecode", tmp_path / "bytecode"):
        done = [sys.executable, "-B", "-c", program, str(tmp_path), str(kept)]
        assert subprocess.run(done, capture_output=True, text=True, check=True).stdout == "1\n"
    assert not kernel.exists() and list((tmp_path / "bytecode").rglob("*.pyc"))
