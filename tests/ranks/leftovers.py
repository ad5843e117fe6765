"""Finding processes that a launch may have left.

Each process of a launch has an inherited mark in its environment, whatever its command line, parent or session: D2L_KERNEL_FOLDER
what the helper forked, however often (the system shows a fork the environment with which the helper was started), and D2L_RUN_FOLDER
what was started as a program: a cold launch's supervisor, agents and ranks, and what the reader's function starts.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

_MARKS = ("D2L_KERNEL_FOLDER", "D2L_RUN_FOLDER")


def processes_of(folder):
    """Processes of launches whose temporary files are in `folder`, the warm helper itself left out: its number is in `helper.pid`.

    A helper whose folder is gone should be gone too, and counts.
    """
    folder, found, kept = Path(folder), [], {os.getpid()}
    with contextlib.suppress(FileNotFoundError):
        kept.add(int((folder / "helper.pid").read_text()))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in kept and is_marked(process, folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_marked(process, folder):
    environment = process.environ()
    marked = any(Path(environment.get(name, "/")).is_relative_to(folder) for name in _MARKS)
    return marked or any(str(folder) in part for part in process.cmdline())


def none_left(folder, seconds=5.0):
    """Wait up to `seconds` for the last process to go. Returns those that stay."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
