"""Launches that end in every way, at random: no rank left, no wrong message, the next launch works.

    python -m tests.soak [--launches 200] [--seed 0]

Each ending comes with the words that its message must begin with or hold. Kernels that are killed are real processes.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from d2l_utils import LaunchError, launch
from d2l_utils.launching import folders
from tests.ranks.leftovers import none_left, processes_of
from tests.ranks.test_endings import end

# how the culprit ends -> what the message says
WORDS = {
    "raise": r"^rank {c} failed: ValueError: boom 中文 αβ",
    "segv": r"^rank {c} was killed by SIGSEGV",
    "kill": r"^rank {c} was killed by SIGKILL \(often: out of memory\)",
    "exit": r"^rank {c} exited before the others finished",
    "_exit": r"^rank {c} exited before the others finished",
    "exit status": r"^rank {c} failed: sys.exit\(3\)",
    "return": r"^rank {c} returned before the others finished",
    "stubborn": r"^rank {c} exited with status 5",
    "all": r"^rank \d failed: KeyError: 'nobody has it'",
    "sleep": r"^timed out after 1 s: .*rank {c} never joined",
    "children": r"^rank {c} failed: OSError: after starting a child",
}
KERNEL = """
from d2l_utils import launch
from d2l_utils.launching import folders
from tests.ranks.test_endings import end
print(folders.base(), flush=True)
launch(end, world_size={n}, how="sleep")
"""


def ending(how: str, n: int, culprit: int) -> str | None:
    """One launch that ends so. Returns what was wrong with it, or None."""
    try:
        run = launch(end, world_size=n, how=how, culprit=culprit, timeout=1 if how == "sleep" else 60, output="quiet")
    except LaunchError as error:
        if how in ("well", "late") or not re.search(WORDS[how].format(c=culprit), error.message.splitlines()[0]):
            return error.message
        return None
    return None if how in ("well", "late") and run.results == [2.0 * n] * n else f"it succeeded with {run.results}"


def stopped(n: int, rng: random.Random) -> str | None:
    """A launch that is stopped from another thread at some moment."""
    stop = threading.Event()
    timer = threading.Timer(rng.uniform(0, 1.0), stop.set)
    timer.start()
    try:
        launch(end, world_size=n, how="sleep", culprit=0, output="quiet", stop=stop)
    except LaunchError as error:
        return None if error.message.startswith("stopped") else error.message
    finally:
        timer.cancel()
    return "it was not stopped"


def killed(n: int, rng: random.Random) -> str | None:
    """A process that is killed outright at some moment of its launch."""
    code = KERNEL.format(n=n)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    folder = process.stdout.readline().strip()
    deadline = time.monotonic() + 60
    while not list(Path(folder).glob("run-*/rank*.pid")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.wait()
    process.stdout.close()
    left = none_left(folder)
    time.sleep(1)
    if left or os.path.exists(folder):
        return f"left: {left}, folder exists: {os.path.exists(folder)}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, wrong, counts = random.Random(options.seed), 0, dict.fromkeys([*WORDS, "well", "late", "stopped", "killed"], 0)
    for number in range(options.launches):
        how, n = rng.choice(list(counts)), rng.choice((2, 3, 4))
        counts[how] += 1
        problem = (
            killed(n, rng)
            if how == "killed"
            else stopped(n, rng)
            if how == "stopped"
            else ending(how, n, rng.randrange(n))
        )
        if left := none_left(folders.base()):
            problem = f"{problem or ''} left behind: {left}"
        if problem is None:
            problem = ending("well", 2, 0)  # the next launch works
        if problem:
            wrong += 1
            print(f"launch {number}, {how} on {n} ranks: {problem}", flush=True)
    print(
        f"{options.launches} launches {counts}: {wrong} wrong, {len(processes_of(folders.base()))} ranks left",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
