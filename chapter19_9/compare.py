"""Measured beside formula, for any strategies and world sizes. In a terminal: ``python -m
chapter19_9.compare --help``.

    rows = compare(strategies=("ddp", "zero1", "zero2", "zero3"), world_sizes=(2, 4))
    print(table(rows))

Every figure in the columns "measured" comes from a run on real ranks; the formulas stand beside them.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from chapter19_9 import signature, theory
from chapter19_9.strategies import OPTIONAL, STRATEGIES, get
from d2l_utils.transformer import TransformerConfig

if TYPE_CHECKING:
    from chapter19_9.snapshots import Snapshots
    from chapter19_9.train import Result

STATES = ("parameters", "gradients", "optimizer")
DEFAULT = TransformerConfig()


@dataclass(frozen=True)
class Row:
    """One strategy at one world size. Bytes are those of the rank with the most; errors are relative to the
    formula.

    held, held_formula : model states at rest, after a step, in bytes.
    between, between_formula : model states between forward and backward: gathered weights are parameters, and what
                         gradients keep from step to step is gradients. None where a step cannot be looked into.
    sent, sent_formula : logical bytes that one rank sends in a step (on an ideal ring), mean over the ranks.
    counts, counts_formula : collectives that a rank launches in a step and that send something, by name; the formula
                         is None for DeepSpeed, whose own buckets and checks are in it.
    on_gloo            : what one rank sends by the algorithms that gloo ran for them, mean over the ranks; None on
                         another backend.
    wire               : what one rank's connections carried in that step as the kernel counts it, headers included,
                         mean over the ranks; None where it cannot be read.
    peak               : most bytes at one moment of a step: model states, gathered weights, whole gradients and
                         activations. Of three steps the least, since gloo's threads may let go of a buffer late, which
                         is not the strategy's. It has no formula here.
    at_peak            : the model states in it; None as in ``between``.
    losses             : global mean loss of each step, in nats.
    loss_error         : largest relative difference from the losses of one process on the whole batch.
    agree              : all ranks end with the same weights.
    seconds            : median of the steps between the first two and the first recorded one, slowest rank; None
                         when too few.
    """

    strategy: str
    world_size: int
    held: theory.States
    held_formula: theory.States
    between: theory.States | None
    between_formula: theory.States | None
    sent: float
    sent_formula: float
    counts: dict[str, int]
    counts_formula: dict[str, int] | None
    on_gloo: float | None
    wire: float | None
    peak: int
    at_peak: theory.States | None
    losses: tuple[float, ...]
    loss_error: float
    agree: bool
    seconds: float | None

    @property
    def held_error(self) -> float:
        return max(_error(getattr(self.held, name), getattr(self.held_formula, name)) for name in STATES)

    @property
    def between_error(self) -> float:
        """0 where nothing was seen."""
        seen = self.between is not None
        return max(
            _error(getattr(self.between, name), getattr(self.between_formula, name)) if seen else 0.0 for name in STATES
        )

    @property
    def sent_error(self) -> float:
        return _error(self.sent, self.sent_formula)


def compare(
    strategies: Sequence[str] = tuple(STRATEGIES),
    world_sizes: Sequence[int] = (1, 2, 4),
    config: TransformerConfig = DEFAULT,
    *,
    steps: int = 6,
    batch: int = 8,
    timeout: float = 60.0,
    device: str | None = None,
    each: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Train every strategy at every world size on real ranks, and put what was measured beside the formulas.

    One process on the whole batch is always run: it is what losses are compared with. A strategy that does
    not communicate is listed for one rank only, since several would train several models. timeout: seconds for
    each strategy. device: as in ``launch``. ``each`` is given every row as soon as it is there, from a launch of its
    own; without it, all strategies of a world size share a launch.

    Raises ValueError for an unknown strategy or one that needs an extra which is not installed, and for a world
    size that ``batch`` does not divide by; LaunchError when a rank fails.
    """
    from chapter19_9.checks import check_batch
    from chapter19_9.snapshots import measure
    from d2l_utils import launch
    from d2l_utils.device import check_world_size

    if steps < 3:
        raise ValueError(
            f"steps is {steps}: it must be at least 3: the last is recorded (and some after it), DDP settles in the second"
        )
    sizes = [check_world_size(n, "world_sizes") for n in world_sizes]
    for n in sizes:
        check_batch(batch, n)
    for name in strategies:
        get(name).check()
    wanted = [(facts.name, n) for facts in map(get, strategies) for n in (sizes if facts.communicates else [1])]

    def results(names: list[str], n: int) -> dict[str, list[tuple[Result, Snapshots | None]]]:
        run = launch(
            measure, world_size=n, device=device, timeout=timeout * len(names), output="quiet",
            strategies=names, config=config, steps=steps, batch=batch,
        )  # fmt: skip
        return {name: [rank[name] for rank in run.results] for name in names}

    shapes = theory.shapes(config)
    done = {("single", 1): results(["single"], 1)["single"]}
    if each is None:
        for n in {n for _, n in wanted}:
            together = [name for name, size in wanted if size == n and (name, n) not in done]
            done |= {(name, n): ranks for name, ranks in (results(together, n) if together else {}).items()}
    reference, rows = done["single", 1][0][0].losses, []
    for name, n in wanted:
        rows.append(_row(done.get((name, n)) or results([name], n)[name], reference, shapes, steps))
        if each is not None:
            each(rows[-1])
    return rows


def _row(
    ranks: list[tuple[Result, Snapshots | None]], reference: list[float], shapes: list[theory.Shape], steps: int
) -> Row:
    results, snaps = [result for result, _ in ranks], [snap for _, snap in ranks if snap is not None]
    first, n = results[0], len(ranks)
    timed = [max(result.seconds[i] for result in results) for i in range(2, steps - 1)]
    events = [event for result in results for event in result.recording.events if event.kind == "collective"]
    sending = [event.name for event in events if event.rank == 0 and event.sent_bytes]
    wires = [result.recording.wire_bytes for result in results]
    on_gloo = [event.backend_bytes for event in events if event.name != "barrier"]
    return Row(
        strategy=first.strategy,
        world_size=n,
        held=theory.fullest(result.held for result in results),
        held_formula=theory.fullest(theory.exact_memory(first.strategy, shapes, n)),
        between=theory.fullest(snap.between for snap in snaps) if snaps else None,
        between_formula=theory.fullest(signature.between(first.strategy, shapes, n)) if snaps else None,
        sent=sum(event.sent_bytes for event in events) / n,
        sent_formula=theory.exact_volume(first.strategy, shapes, n),
        counts=dict(Counter(sending)),
        counts_formula=signature.launches(first.strategy, shapes, n) if snaps else None,
        on_gloo=None if None in on_gloo else sum(on_gloo) / n,
        wire=None if None in wires else sum(wires) / n,
        peak=max(result.peak or 0 for result in results),
        at_peak=theory.fullest(snap.at_peak for snap in snaps) if snaps else None,
        losses=tuple(first.losses),
        loss_error=max(map(_error, first.losses, reference)),
        agree=all(result.agree for result in results),
        seconds=median(timed) if timed else None,
    )


def _error(measured: float, expected: float) -> float:
    """Relative to what was expected; infinite when nothing was."""
    if math.isclose(measured, expected, rel_tol=1e-12):  # N = 3 divides no float exactly
        return 0.0
    return abs(measured - expected) / expected if expected else float("inf")


HEAD = (
    "strategy", "ranks", "P", "G", "O", "error", "sent per rank", "error", "peak", "last loss", "vs 1 process", "agree",
    "step",
)  # fmt: skip
KEY = """\
P, G, O       bytes of parameters, gradients, optimizer states on the fullest rank. All bytes in MB (1e6), measured / formula.
error         of the figures to its left, relative to the formula; of P, G, O the largest. exact: equal to the byte.
peak          most at one moment of a step, gathered weights and activations included; measured only, the least of three.
vs 1 process  largest relative difference from the losses of one process on the whole batch; same: none at all.
agree         all ranks end with exactly the same weights.
step          median, slowest rank. More ranks than cores take turns: no comparison of speed, least of all between rows of
              different ranks. `make bench` compares by turns."""

DEEPSPEED = """\
deepspeed     O has the copy of the weights that it trains. Stages 1 and 2 send half as much again as ZeRO needs: by default
              they all-reduce gradients of which each rank needs a part."""


def table(rows: Sequence[Row]) -> str:
    """The rows as text: bytes in MB (1e6), measured / formula, and the larger relative error in a state; then the key."""
    lines = [HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (_line(line, widths) for line in lines)
    return "\n".join([head, _rule(widths), *body, KEY])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.strategy,
        str(row.world_size),
        *(_pair(getattr(row.held, name), getattr(row.held_formula, name)) for name in STATES),
        _told(row.held_error),
        _pair(row.sent, row.sent_formula),
        _told(row.sent_error),
        f"{row.peak / 1e6:.3f}",
        f"{row.losses[-1]:.4f}",
        f"{row.loss_error:.0e}" if row.loss_error else "same",
        "yes" if row.agree else "NO",
        "-" if row.seconds is None else f"{row.seconds * 1e3:.0f} ms",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _rule(widths: Sequence[int]) -> str:
    return "  ".join("-" * width for width in widths)


def _pair(measured: float, formula: float) -> str:
    return f"{measured / 1e6:.3f} / {formula / 1e6:.3f}"


def _told(error: float) -> str:
    return f"{error:.2%}" if error else "exact"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for the command line's strategies and world sizes, each row when it is there."""
    parser = argparse.ArgumentParser(prog="python -m chapter19_9.compare", description=compare.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = [*STRATEGIES, *(name for name, strategy in OPTIONAL.items() if strategy.installed)]
    parser.add_argument("--strategies", nargs="+", default=default, metavar="NAME")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[4], metavar="N")
    parser.add_argument("--layers", type=int, default=DEFAULT.layers)
    parser.add_argument("--width", type=int, default=DEFAULT.width)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="samples in a step over all ranks")
    given = parser.parse_args(arguments)
    shown: list[Row] = []
    try:
        config = TransformerConfig(layers=given.layers, width=given.width)
        # Rows come one by one, before it is known how wide they get: no state takes more than O, and nothing sent than 2 O.
        figure = len(_pair(*[2 * theory.adamw_states(config).optimizer] * 2))
        widths = [max(map(len, STRATEGIES)), 5, figure, figure, figure, 6, figure, 6, 7, 9, 12, 5, 8]

        def show(row: Row) -> None:
            if not shown:
                print(_line(HEAD, widths), _rule(widths), sep="\n")
            print(_line(_cells(row), widths), flush=True)
            shown.append(row)

        compare(given.strategies, given.world_sizes, config, steps=given.steps, batch=given.batch, each=show)
    except ValueError as error:
        parser.error(str(error))
    key = f"{KEY}\n{DEEPSPEED}" if any(row.strategy in OPTIONAL for row in shown) else KEY
    print(f"\n{key}\nOther numbers of ranks: --world-sizes 1 2 4 8. Only some strategies: --strategies zero3 fsdp2.")


if __name__ == "__main__":
    main()
