"""What `make bench` prints: launching, live changes, recording and steps on this machine, as ratios within one run.

    python -m tests.bench [--repeats 5] [--only launch,first,live,record,step,dryrun]

Every figure is a median. Things that are compared are timed in turn, one of each per round, so that a busy moment of the machine
falls on all of them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import elastic, recorder, steps
from tests.bench.functions import one_all_reduce

ONE_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4) * dist.get_rank()
dist.all_reduce(x)
dist.destroy_process_group()
"""


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def plain(script: Path, ranks: int) -> None:
    """Bare torchrun, as a reader would type it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    subprocess.run(command, check=True, capture_output=True)


def medians(rounds: int, **what) -> dict[str, float]:
    """Median seconds of each function, run in turn for so many rounds."""
    taken: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds):
        for name, function in what.items():
            taken[name].append(seconds(function))
    return {name: statistics.median(values) for name, values in taken.items()}


def show(name: str, value: float, unit: str, aim: str, good: bool | None = None) -> None:
    verdict = "" if good is None else "met" if good else "NOT MET"
    print(f"{name:<62} {value:>9.3f} {unit:<5} aim {aim:<16} {verdict}", flush=True)


def launching(rounds: int) -> None:
    """Warm launch against bare torchrun and against elastic launch that forks inside the calling process."""
    from d2l_utils import launch

    launch(one_all_reduce, world_size=2, output="quiet")
    with tempfile.TemporaryDirectory() as folder, elastic.Forker() as forker:
        script = Path(folder) / "one.py"
        script.write_text(ONE_ALL_REDUCE)
        for ranks in (2, 8):
            found = medians(
                rounds,
                torchrun=lambda n=ranks: plain(script, n),
                warm=lambda n=ranks: launch(one_all_reduce, world_size=n, output="quiet"),
                forking=lambda n=ranks: forker.run(script, n),
            )
            show(f"bare torchrun, {ranks} ranks", found["torchrun"], "s", "-")
            show(f"elastic launch forking in the caller, {ranks} ranks", found["forking"], "s", "-")
            show(f"warm launch, {ranks} ranks", found["warm"], "s", "-")
            ratio = found["torchrun"] / found["warm"]
            show(f"bare torchrun / warm launch, {ranks} ranks", ratio, "x", ">= 20", ratio >= 20)
            ratio = found["warm"] / found["forking"]
            show(f"warm launch / elastic launch forking, {ranks} ranks", ratio, "x", "<= 1.2", ratio <= 1.2)


def first(rounds: int) -> None:
    """The first launch of a fresh Python, its imports included, against one bare torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "one.py"
        script.write_text(ONE_ALL_REDUCE)
        code = (
            "from d2l_utils import launch; from tests.bench.functions import one_all_reduce; "
            "launch(one_all_reduce, world_size=2, output='quiet')"
        )
        fresh = [sys.executable, "-c", code]
        found = medians(
            rounds,
            torchrun=lambda: plain(script, 2),
            first=lambda: subprocess.run(fresh, check=True, capture_output=True),
            import_only=lambda: subprocess.run([sys.executable, "-c", "import d2l_utils"], check=True),
            python_only=lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        )
        ratio = found["first"] / found["torchrun"]
        show("first launch of a process, 2 ranks", found["first"], "s", "-")
        show("first launch / bare torchrun, 2 ranks", ratio, "x", "<= 1.0", ratio <= 1.0)
        cost = found["import_only"] - found["python_only"]
        show("import d2l_utils", cost, "s", "<= 0.1", cost <= 0.1)


def live(rounds: int) -> None:
    """From a released knob of the cockpit to its redrawn sheet and player: 4 ranks, 5 training steps, two recorded."""
    from chapter19_9 import strategies
    from chapter19_9.cockpit import Cockpit

    for name in strategies.STRATEGIES:
        panel = Cockpit(world_size=4, strategy=name)
        taken = []
        for _ in range(rounds):
            taken.append(seconds(lambda panel=panel: (panel.release(), panel.wait())))
            assert panel.error is None, panel.error
        panel.close()
        value = statistics.median(taken)
        show(f"live change, 4 ranks, 5 steps: {name}", value, "s", "<= 2", value <= 2)


def recording(rounds: int) -> None:
    for name, value, unit, aim in recorder.measure():
        show(name, value, unit, str(aim))


def stepping(rounds: int) -> None:
    """A step of ZeRO by hand against its library twin, same model and batch."""
    for one, other in steps.PAIRS:
        for ranks in steps.RANKS:
            mine, theirs, ratio = steps.measure(one, other, ranks, rounds)
            show(f"a step of {one}, {ranks} ranks", 1e3 * mine, "ms", "-")
            show(f"a step of {other}, {ranks} ranks", 1e3 * theirs, "ms", "-")
            show(f"{one} / {other}, {ranks} ranks", ratio, "x", "0.8, <= 1.0", ratio <= 1.0)


def dry_running(rounds: int) -> None:
    """65 billion parameters, 80 blocks, 1,024 pretended ranks, each time in a fresh Python."""
    from chapter19_9.dryrun import Plan, dry_run

    taken, used, memory = [], [], []
    for _ in range(min(rounds, 3)):
        start = time.perf_counter()
        found = dry_run(Plan("llama-65b", "fsdp2", world_size=1024), output="quiet")
        taken.append(time.perf_counter() - start)
        used.append(found.cpu_seconds)
        memory.append(found.memory / 1e9)
    value, most = statistics.median(taken), max(memory)
    show("dry run, 65 B on 1,024 ranks, imports included", value, "s", "8, <= 15", value <= 15)
    show("dry run, 65 B on 1,024 ranks, time of one core", statistics.median(used), "s", "-")
    show("dry run, 65 B on 1,024 ranks, resident memory", most, "GB", "<= 1.5", most <= 1.5)


def main() -> None:
    parts = {
        "launch": launching,
        "first": first,
        "live": live,
        "record": recording,
        "step": stepping,
        "dryrun": dry_running,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(parts))
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(parts):
        parser.error(f"--only {','.join(sorted(unknown))}: it must be among {','.join(parts)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {arguments.repeats}")
    for name in chosen:
        parts[name](arguments.repeats)


if __name__ == "__main__":
    main()
