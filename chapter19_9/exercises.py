"""The exercises' checks: each runs the reader's function on real ranks and says whether it does what was asked.

    check("average", mine)

Nothing here knows a solution: a check looks at what the ranks return.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from d2l_utils import LaunchError, launch
from d2l_utils.traffic import sent_by_gloo

Judge = Callable[[list[Any], int], str | None]


@dataclass(frozen=True)
class Exercise:
    """world_sizes: where it is tried. judge(results, n): None when right, else what is wrong, in words."""

    world_sizes: tuple[int, ...]
    judge: Judge
    arguments: tuple[tuple[str, Any], ...] = ()


def check(name: str, answer: Callable[..., Any], uses: Iterable[Any] = ()) -> None:
    """Run ``answer`` on real ranks at several world sizes and print one line: right, not done yet, or what is wrong.

    Raises ValueError for an exercise that does not exist.
    """
    if name not in EXERCISES:
        raise ValueError(f"name is {name!r}: it must be one of {', '.join(EXERCISES)}")
    exercise = EXERCISES[name]
    if is_stub(answer):
        print(f"{name}: not done yet")
        return
    for n in exercise.world_sizes:
        try:
            run = launch(answer, world_size=n, timeout=30, output="quiet", uses=uses, **dict(exercise.arguments))
        except LaunchError as error:
            print(f"{name}: not yet. With {_ranks(n)}: {error.message}")
            return
        if wrong := exercise.judge(run.results, n):
            print(f"{name}: not yet. With {_ranks(n)}: {wrong}")
            return
    *others, last = exercise.world_sizes
    print(f"{name}: right, with {''.join(f'{n}, ' for n in others)}{_ranks(last)}")


def is_stub(answer: Callable[..., Any]) -> bool:
    """Whether the function's body is still empty: nothing but a docstring, ``...`` or ``pass``. Its text is not needed."""
    return (
        isinstance(answer, types.FunctionType)
        and answer.__name__ != "<lambda>"
        and _instructions(answer) == _instructions(lambda: None)
    )


def _instructions(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(step.opname, step.argval) for step in dis.get_instructions(function) if step.opname != "NOP"]


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def _all_close(wanted: Callable[[int, int], float]) -> Judge:
    """Each rank r of n must return wanted(r, n), within 1e-6."""

    def judge(results: list[Any], n: int) -> str | None:
        for rank, result in enumerate(results):
            try:
                value = float(result)
            except (TypeError, ValueError):
                return f"rank {rank} returned {result!r}, not a number"
            if abs(value - wanted(rank, n)) > 1e-6 * max(1.0, abs(wanted(rank, n))):
                return f"rank {rank} returned {value:g}, expected {wanted(rank, n):g}"
        return None

    return judge


def _epochs(results: list[Any], n: int) -> str | None:
    """Each rank returns its indices of epochs 0 and 1, of 12 samples."""
    for epoch in (0, 1):
        drawn = sorted(index for rank in results for index in rank[epoch])
        if drawn != list(range(12)):
            return f"in epoch {epoch} the ranks together drew {drawn}"
    if all(rank[0] == rank[1] for rank in results):
        return "both epochs have the same order"
    return None


def _predicted(results: list[Any], n: int) -> str | None:
    for rank, (predicted, measured) in enumerate(results):
        if predicted != measured:
            return f"rank {rank} predicted {predicted} bytes and measured {measured}"
    return None


def _held(wanted: Callable[[int, int], int]) -> Judge:
    """Each rank r of n returns (predicted, measured), and both are wanted(r, n)."""

    def judge(results: list[Any], n: int) -> str | None:
        for rank, (predicted, measured) in enumerate(results):
            if predicted != measured:
                return f"rank {rank} predicted {predicted} and measured {measured}"
            if measured != wanted(rank, n):
                return f"rank {rank} measured {measured}, expected {wanted(rank, n)}"
        return None

    return judge


def _window(results: list[Any], n: int) -> str | None:
    """Each rank returns (gradient, all-reduces): the mean of 0 .. 4n - 1, and one."""
    for rank, (gradient, count) in enumerate(results):
        if abs(gradient - (4 * n - 1) / 2) > 1e-5:
            return f"the gradient on rank {rank} is {gradient:g}, expected {(4 * n - 1) / 2:g}"
        if count != 1:
            return f"rank {rank} counted {count} all-reduces"
    return None


def _peak(results: list[Any], n: int) -> str | None:
    for rank, (predicted, measured) in enumerate(results):
        if abs(predicted / measured - 1) > 0.05:
            return f"rank {rank} predicted {predicted:,} bytes and reached {measured:,}"
    return None


def _cluster(results: list[Any], n: int) -> str | None:
    """Each rank returns (nodes, GB): the fewest on which Llama 3 70B fits, and a device's memory that saves one."""
    from chapter19_9.choosing.advisor import Question, advise

    def fits(nodes: int, memory: int) -> bool:
        return nodes > 0 and advise(Question("llama3-70b", nodes=nodes, memory=float(memory))).chosen is not None

    for rank, (nodes, memory) in enumerate(results):
        if not fits(nodes, 80) or fits(nodes - 1, 80):
            return f"rank {rank} returned {nodes} nodes, " + (
                "and fewer do" if fits(nodes, 80) else "which are too few"
            )
        if not fits(nodes - 1, memory) or fits(nodes - 1, memory - 1):
            less = fits(nodes - 1, memory)
            return f"rank {rank} returned {memory} GB, " + ("and less does" if less else "which is too little")
    return None


def _shards_of_ten(results: list[Any], n: int) -> str | None:
    """Each rank returns [first, one after the last] of the real elements in its shard of a vector of ten."""
    size = -(-10 // n)
    for rank, result in enumerate(results):
        wanted = [min(10, rank * size), min(10, (rank + 1) * size)]
        if not isinstance(result, list | tuple) or list(result) != wanted:
            return f"rank {rank} returned {result!r}, expected {wanted}"
    return None


def _lists(wanted: Callable[[int], list[float]]) -> Judge:
    """Each rank of n must return wanted(n)."""

    def judge(results: list[Any], n: int) -> str | None:
        for rank, result in enumerate(results):
            if not isinstance(result, list | tuple) or list(result) != wanted(n):
                return f"rank {rank} returned {result!r}, expected {wanted(n)}"
        return None

    return judge


def _through_gloo(results: list[Any], n: int) -> str | None:
    """Each rank returns (predicted, measured) bytes that it sends for a reduce-scatter of 4,800,000 bytes over gloo."""
    sends = sent_by_gloo("all_reduce", 4_800_000, n) or 0.0
    for rank, result in enumerate(results):
        predicted, measured = result
        if measured is not None and not 0.98 * sends <= measured <= 1.05 * sends:
            return f"rank {rank} measured {measured} bytes: is the reduce-scatter alone between the two readings?"
        if abs(predicted - sends) > 0.02 * sends:
            return f"rank {rank} predicted {predicted:,.0f} bytes; the kernel counts about {measured or sends:,.0f}"
    return None


def _read_back(results: list[Any], n: int) -> str | None:
    """Each rank returns (numbers, files): its share of the ten, and which of the four files it read for them."""
    size = -(-10 // n)
    for rank, (numbers, files) in enumerate(results):
        places = range(min(10, rank * size), min(10, (rank + 1) * size))
        if list(numbers) != [SAVED[at // 3][at % 3] for at in places]:
            return f"rank {rank} has {list(numbers)}, expected {[SAVED[at // 3][at % 3] for at in places]}"
        if sorted(files) != sorted({at // 3 for at in places}):
            return f"rank {rank} read the files {sorted(files)}, and needs {sorted({at // 3 for at in places})}"
    return None


# 19.9.13: what four ranks saved of a vector of ten
SAVED = [[1, 1, 2], [3, 5, 8], [13, 21, 34], [55]]

EXERCISES = {
    # 19.9.1: rank r holds r + 1; every rank returns the mean over the ranks, from an all-gather
    "average": Exercise((1, 2, 3, 4), _all_close(lambda rank, n: (n + 1) / 2)),
    # 19.9.1: rank r has r + 1 samples, all with gradient r; every rank returns the mean over the samples
    "unequal": Exercise(
        (1, 2, 3), _all_close(lambda rank, n: sum(r * (r + 1) for r in range(n)) / sum(range(1, n + 1)))
    ),
    # 19.9.2: rank r starts with r and ends with its left neighbour's number
    "shift": Exercise((2, 3, 4), _all_close(lambda rank, n: (rank - 1) % n)),
    # 19.9.2: all_reduce from reduce and broadcast; rank r brings 10 ** r
    "reduce and broadcast": Exercise((1, 2, 4), _all_close(lambda rank, n: sum(10**r for r in range(n)))),
    "reshuffle": Exercise((2, 3), _epochs),
    # 19.9.3: the mean of 0 .. 9, each sample once, whatever the sampler repeats
    "mean of ten": Exercise((1, 3, 4), _all_close(lambda rank, n: 4.5)),
    # 19.9.4: predicted and measured bytes of optimizer state
    "optimizer bytes": Exercise((1, 2), _predicted),
    # 19.9.5: which elements of a flat vector of ten are this rank's
    "my shard": Exercise((1, 2, 3, 4, 8), _shards_of_ten),
    # 19.9.8: numbers of Linear(30, 7) that each rank holds as a share of one flat vector
    "flat shard": Exercise((1, 2, 3), _held(lambda rank, n: -(-217 // n))),
    # 19.9.9: the same, dealt out by rows: 7 rows of 30 + 1 numbers in chunks of ceil(7 / n)
    "rows": Exercise((1, 2, 4), _held(lambda rank, n: 31 * len(range(7)[rank * -(-7 // n) :][: -(-7 // n)]))),
    # 19.9.12: predicted and measured bytes at the fullest moment of DDP's step
    "peak": Exercise((1, 2), _peak),
    # 19.9.12: how many nodes of 8 x 80 GB a model of 70 billion parameters takes, and what would save one
    "cluster": Exercise((1,), _cluster),
    # 19.9.6: each rank has a shard of W's rows (rank r: one row of r + 1); y = W x for x of ones, on every rank, summed
    "sharded product": Exercise((1, 2, 3), _all_close(lambda rank, n: 4 * n * (n + 1) / 2)),
    # 19.9.7: the same product, gathered by FSDP2: sum of y, numbers of W on a rank before forward and after it
    "kept": Exercise((1, 2, 3), _lists(lambda n: [2.0 * n * (n + 1), 4, 4 * n])),
    # 19.9.7: all-gathers in one forward and backward of one unit, kept and freed in between
    "gathers": Exercise((2, 3), _lists(lambda n: [1, 2])),
    # 19.9.10: the sum over the ranks of r + 1, everywhere, from a reduce-scatter and an all-gather
    "two halves": Exercise((1, 2, 4), _all_close(lambda rank, n: 6 * n * (n + 1))),
    # 19.9.10: what gloo sends for a reduce-scatter, predicted and counted by the kernel
    "on the wire": Exercise((2, 4), _through_gloo),
    # 19.9.11: rank r has the samples 4r .. 4r + 3 and takes one, then three; gradient of the mean, one all-reduce
    "window": Exercise((1, 2, 3), _window),
    # 19.9.13: a vector of ten in the files of four ranks, read back by n
    "read back": Exercise((1, 2, 3), _read_back, (("files", SAVED),)),
    # 19.9.11: predicted and measured bytes that a rank sends in a step
    "bytes in bf16": Exercise((1, 2, 4), _predicted),
}
