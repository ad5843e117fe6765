"""What recording costs: a step of the toy Transformer under DDP, plain and recorded by turns on the same ranks.

A figure is the median over repeats of (recorded / plain - 1), each pair measured back to back, in percent; the slowest
rank counts. The step itself is what the timeline shows; the whole ``with`` block also holds turning the trace into
events, which happens after the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from d2l_utils import launch
from d2l_utils.record import record
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=4, width=128, heads=4, length=64)
BATCH, LOOP = 8, 20  # sequences on each rank; steps of a run in which one is recorded

Figure = tuple[str, float, str, str]  # name, value, unit, aim


def measure(world_size: int = 2, repeats: int = 15) -> list[Figure]:
    """(name, value, unit, aim) of each figure, measured on `world_size` real ranks with `repeats` pairs."""
    done = launch(rank_times, world_size=world_size, repeats=repeats, output="quiet", timeout=300)
    times = {
        key: [max(values) for values in zip(*(r[key] for r in done.results), strict=True)] for key in done.results[0]
    }

    def percent(recorded: str, plain: str) -> float:
        return 100 * (statistics.median(a / b for a, b in zip(times[recorded], times[plain], strict=True)) - 1)

    ranks = f"{world_size} ranks"
    return [
        (f"a plain step, {ranks}", 1e3 * statistics.median(times["plain"]), "ms", "67 to 175"),
        (f"recorded step, times and bytes, {ranks}", percent("times step", "plain"), "% longer", "10 or less"),
        (f"recorded step, allocations too, {ranks}", percent("memory step", "plain"), "% longer", "25 or less"),
        (f"with its events made, times and bytes, {ranks}", percent("times whole", "plain"), "% longer", ""),
        (f"with its events made, allocations too, {ranks}", percent("memory whole", "plain"), "% longer", ""),
        (f"{LOOP} steps of which 1 is recorded, {ranks}", percent("loop", "plain loop"), "% longer", "5 or less"),
    ]


def rank_times(repeats: int) -> dict[str, list[float]]:
    """On a rank: seconds of each repeat, by what was measured."""
    model = DistributedDataParallel(Transformer(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters())
    text = sequences(CONFIG.length, BATCH, offset=BATCH * dist.get_rank())
    times: dict[str, list[float]] = {}

    def step() -> None:
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()

    def recorded(name: str, allocations: bool) -> None:
        begun = time.perf_counter()
        with record(model, optimizer, allocations=allocations) as recording:
            step()
        times.setdefault(f"{name} whole", []).append(time.perf_counter() - begun)
        assert recording.seconds is not None
        times.setdefault(f"{name} step", []).append(recording.seconds)

    def loop(chosen: int | None) -> None:
        for number in range(LOOP):
            with record(model, optimizer, enabled=number == chosen):
                step()

    def timed(name: str, work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - begun)

    cases: list[Callable[[], None]] = [
        lambda: timed("plain", step),
        lambda: recorded("times", allocations=False),
        lambda: recorded("memory", allocations=True),
    ]
    loops: list[Callable[[], None]] = [
        lambda: timed("plain loop", lambda: loop(None)),
        lambda: timed("loop", lambda: loop(LOOP // 2)),
    ]
    for _ in range(3):
        step()
    for rounds, group in ((repeats, cases), (max(5, repeats // 3), loops)):
        for number in range(rounds):
            # Another order each time: whoever comes first after a pause is slower.
            for case in group[number % len(group) :] + group[: number % len(group)]:
                dist.barrier()
                case()
    return times
