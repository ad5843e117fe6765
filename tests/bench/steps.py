"""Step times of strategies by hand against their library twins, through the one training loop: same model, same batch, same ranks.

One launch holds all repeats. A repeat trains both of a pair, one after the other on the same ranks, the first of them in turn; its
figure is the median over the steps after warm-up, each as long as its slowest rank. The ratio is the median over the repeats'
own ratios, so that a busy moment of the machine falls on both sides of it.
"""

from __future__ import annotations

import statistics

from chapter19_9.train import train
from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig

CONFIG = TransformerConfig(layers=4, width=256, heads=4, length=64)
BATCH = 8  # samples in a step over all ranks
STEPS, WARM_UP = 12, 2  # in a repeat, and how many of them do not count
PAIRS = (("zero3", "fsdp2"), ("zero1", "zero_redundancy"))  # by hand, by library
RANKS = (2, 4)


def measure(one: str, other: str, world_size: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of a step of ``one`` and of ``other``, and the median of the ratios one / other."""
    options = {"one": one, "other": other, "repeats": repeats}
    done = launch(rank_times, world_size=world_size, output="quiet", timeout=300, **options)

    def by_repeat(name: str) -> list[float]:
        return [
            statistics.median([max(ranks) for ranks in zip(*repeat, strict=True)][WARM_UP:])
            for repeat in zip(*(result[name] for result in done.results), strict=True)
        ]

    first, second = by_repeat(one), by_repeat(other)
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return statistics.median(first), statistics.median(second), statistics.median(ratios)


def rank_times(one: str, other: str, repeats: int) -> dict[str, list[list[float]]]:
    """On a rank: seconds of each step of each repeat, by strategy."""
    times: dict[str, list[list[float]]] = {one: [], other: []}
    for number in range(repeats):
        for name in (one, other) if number % 2 == 0 else (other, one):
            times[name].append(train(name, CONFIG, steps=STEPS, batch=BATCH).seconds)
    return times
