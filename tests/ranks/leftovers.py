"""Finding processes that a launch may have left."""

import time

import psutil


def processes_of(folder):
    """Processes of launches whose temporary files are in `folder`, the warm helpers themselves left out."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            own = any(str(folder) in part for part in line) and process.status() != psutil.STATUS_ZOMBIE
            # forks of the helper show its command line: the helper itself is the one that a launching process started
            if own and not (
                line[1:3] and line[2].endswith("warm.py") and "warm.py" not in " ".join(process.parent().cmdline())
            ):
                found.append(process)
        except (psutil.Error, AttributeError):
            continue
    return found


def none_left(folder, seconds=5.0):
    """Wait up to `seconds` for the last process to go. Returns those that stay."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
