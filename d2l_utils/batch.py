"""The arithmetic of a global batch: B_global = B_micro x N_dp x N_accum, in both directions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """One way to make a global batch: `micro` samples a rank and backward pass."""

    micro: int
    ranks: int
    accumulation: int

    @property
    def size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro * self.ranks * self.accumulation


def global_batch(micro: int, ranks: int, accumulation: int = 1) -> int:
    """Samples per optimizer step: micro x ranks x accumulation.

    Raises ValueError for anything that is not a whole number of at least 1.
    """
    _check(micro=micro, ranks=ranks, accumulation=accumulation)
    return Batch(micro, ranks, accumulation).size


def combinations(target: int, ranks: int, largest_micro: int | None = None) -> list[Batch]:
    """Every exact (micro, accumulation) that makes `target` on `ranks` ranks, largest micro-batch first.

    Empty when `target` is not a multiple of `ranks`; :func:`nearest` then says what is possible.
    `largest_micro` leaves out micro-batches that do not fit in memory.
    """
    _check(target=target, ranks=ranks, largest_micro=1 if largest_micro is None else largest_micro)
    if target % ranks:
        return []
    share = target // ranks
    micros = [m for m in range(min(share, largest_micro or share), 0, -1) if share % m == 0]
    return [Batch(micro, ranks, share // micro) for micro in micros]


def nearest(target: int, ranks: int) -> tuple[int, ...]:
    """The possible global batches next to `target` on `ranks` ranks: below and above, or `target` itself."""
    _check(target=target, ranks=ranks)
    below = target // ranks * ranks
    if below == target:
        return (target,)
    return tuple(size for size in (below, below + ranks) if size)


def _check(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
