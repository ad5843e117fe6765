"""Bytecode in ranks is never stale, and none is made twice: Python's own where it serves, else one in the kernel's own folder."""

import os
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


def ranks_answer(lesson: Path, kept: Path, *options: str) -> str:
    program = PROGRAM.partition("import lesson\n")[0] + "import lesson\nprint(lesson.answer)"
    command = [sys.executable, *options, "-c", program, str(lesson.parent), str(kept)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.strip()


def test_a_module_that_was_rewritten_within_a_second_is_not_stale(tmp_path: Path) -> None:
    """X32: the kernel has imported the older text, and Python's own bytecode of that would still do by its whole seconds."""
    lesson, kept = tmp_path / "lesson.py", tmp_path / "kept"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for answer in ("1", "2", "3"):
        lesson.write_text(f"answer = {answer}")
        os.utime(lesson, ns=(0, 1_700_000_000_000_000_000 + int(answer) * 1_000_000))  # in one second
        if answer == "1":
            subprocess.run([sys.executable, "-c", "import lesson"], cwd=tmp_path, check=True, env=env)
            (own,) = (tmp_path / "__pycache__").glob("*.pyc")
            os.utime(own, ns=(0, 1_700_000_000_001_500_000))
        assert ranks_answer(lesson, kept) == answer
        assert ranks_answer(lesson, kept) == answer, "also where the kept bytecode is used"


def test_pythons_own_bytecode_is_used_where_it_serves(tmp_path: Path) -> None:
    """The chapter is not compiled again by the first launch of each kernel."""
    lesson, kept = tmp_path / "lesson.py", tmp_path / "kept"
    lesson.write_text("answer = 1")
    os.utime(lesson, (0, 1_700_000_000))
    assert ranks_answer(lesson, kept) == "1"
    (own,) = (tmp_path / "__pycache__").glob("*.pyc")
    written = own.stat().st_mtime_ns
    assert ranks_answer(lesson, kept) == "1"
    assert own.stat().st_mtime_ns == written and not kept.exists()
    assert ranks_answer(lesson, kept, "-B") == "1" and kept.exists()
