"""Launches that end in every way, at random: no rank left, no wrong message, the next launch works. Then FSDP trainings,
none of which may be reported as failed after it delivered: their ranks now and then abort at the interpreter's end.

    python -m tests.soak [--launches 200] [--fsdp 100] [--seed 0]

Each ending comes with the words that its message must begin with or hold. Kernels that are killed are real processes.
``--fsdp`` is the number of FSDP1 runs, and of FSDP2 runs.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from chapter19_9.train import train
from d2l_utils import LaunchError, launch
from d2l_utils.launching import folders
from d2l_utils.transformer import TransformerConfig
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
    "sleep": r"^timed out after \d+ s: .*rank {c} never joined",
    "children": r"^rank {c} failed: OSError: after starting a child",
}
SMALL = TransformerConfig(layers=2, width=16, heads=2, length=8)
FSDP = {"FSDP1": ("fsdp1", "fsdp1_grad_op"), "FSDP2": ("fsdp2", "fsdp2_no_reshard")}
KERNEL = """
from d2l_utils import launch
from d2l_utils.launching import folders
from tests.ranks.test_endings import end
print(folders.base(), flush=True)
launch(end, world_size={n}, how="sleep")
"""


def ending(how: str, n: int, culprit: int, limit: int = 1) -> str | None:
    """One launch that ends so. Returns what was wrong with it, or None.

    limit: seconds of an ending by timeout; longer, once more, where a busy machine had not even begun by then.
    """
    timeout = limit if how == "sleep" else 60
    try:
        run = launch(end, world_size=n, how=how, culprit=culprit, timeout=timeout, output="quiet")
    except LaunchError as error:
        first = error.message.splitlines()[0]
        if how in ("well", "late"):
            return error.message
        if re.search(WORDS[how].format(c=culprit), first):
            return None
        if how == "sleep" and limit < 16 and first.startswith("timed out after"):
            return ending(how, n, culprit, 4 * limit)
        return error.message
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


def trained(strategy: str, n: int) -> tuple[str | None, int]:
    """One short training. Returns what was wrong with it, or None; and how many ranks failed after delivering."""
    try:
        run = launch(train, world_size=n, strategy=strategy, config=SMALL, steps=3, batch=12, output="quiet")
    except LaunchError as error:
        given = sum(result is not None for result in error.results)
        return f"{given} of {n} ranks had delivered: {error.message}", 0
    bad = [r.rank for r in run.results if not (r.agree and r.changed and len(r.losses) == 3)]
    problem = f"ranks {bad} did not train" if bad or len(run.results) != n else None
    return problem, len(run.late_failures)


def endings(launches: int, rng: random.Random) -> int:
    """So many launches that end at random. Prints each wrong one and a summary; returns how many were wrong."""
    wrong, counts = 0, dict.fromkeys([*WORDS, "well", "late", "stopped", "killed"], 0)
    for number in range(launches):
        how, n = rng.choice(list(counts)), rng.choice((2, 3, 4))
        counts[how] += 1
        if how == "killed":
            problem = killed(n, rng)
        elif how == "stopped":
            problem = stopped(n, rng)
        else:
            problem = ending(how, n, rng.randrange(n))
        if left := none_left(folders.base()):
            problem = f"{problem or ''} left behind: {left}"
        if problem is None:
            problem = ending("well", 2, 0)  # the next launch works
        if problem:
            wrong += 1
            print(f"launch {number}, {how} on {n} ranks: {problem}", flush=True)
    return summary(f"{launches} launches {counts}", wrong)


def trainings(family: str, runs: int, rng: random.Random) -> int:
    """So many trainings by strategies of a family. Prints and returns as ``endings``."""
    wrong, late, counts = 0, 0, Counter[str]()
    for number in range(runs):
        strategy, n = rng.choice(FSDP[family]), rng.choice((2, 3, 4))
        counts[f"{strategy}, {n} ranks"] += 1
        problem, died = trained(strategy, n)
        late += died
        if left := none_left(folders.base()):
            problem = f"{problem or ''} left behind: {left}"
        if problem:
            wrong += 1
            print(f"{family} run {number}, {strategy} on {n} ranks: {problem}", flush=True)
    what = f"{runs} {family} runs {dict(sorted(counts.items()))}"
    return summary(f"{what}, {late} ranks died after they had delivered", wrong)


def summary(what: str, wrong: int) -> int:
    print(f"{what}: {wrong} wrong, {len(processes_of(folders.base()))} ranks left", flush=True)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--fsdp", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    wrong = endings(options.launches, random.Random(options.seed))
    for family in FSDP:
        wrong += trainings(family, options.fsdp, random.Random(options.seed))
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
