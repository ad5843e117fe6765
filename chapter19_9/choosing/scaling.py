"""Step time and efficiency on 8 to 100,000 ranks, predicted (19.9.12).

    print(predict(Setup("gpt2-xl", "fsdp2", ranks=1024, micro_batch=8)))

In a terminal: ``python -m chapter19_9.choosing.scaling --help``. A step is what a rank computes, and what it waits for: a
``Plan`` of its collectives behind the machines' links, by the function that 19.9.10 holds against steps behind a throttled
link. The assumptions are part of every answer. No constant is fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from chapter19_9.choosing import flops
from chapter19_9.choosing.cost import PRECISIONS, Precision
from chapter19_9.choosing.machines import H100, Machines
from chapter19_9.choosing.presets import PRESETS, Model, number, sizes_of, whole
from chapter19_9.choosing.schedule import schedule
from chapter19_9.strategies import STRATEGIES

RANKS = (*(2**power for power in range(3, 17)), 100_000)
MOST_RANKS = 2**20


@dataclass(frozen=True)
class Setup:
    """What is trained, how, and on what.

    model         : sizes, or the name of one in ``PRESETS``.
    strategy      : its name in the registry.
    ranks         : N.
    length        : tokens of one sample; 0 takes the model's own.
    micro_batch   : samples that one rank computes with at once.
    batch         : samples of one step on all ranks together, in as many passes as it takes; 0: a micro-batch on
                    each rank, however many there are.
    precision     : "fp32", or "bf16" for mixed precision.
    checkpointing : compute each block's forward again in backward.
    overlap       : share, from 0 to 1, of what could hide behind computing that really does.

    Raises ValueError that names the field.
    """

    model: Model | str = "gpt2-xl"
    strategy: str = "fsdp2"
    ranks: int = 8
    length: int = 0
    micro_batch: int = 1
    batch: int = 0
    precision: str = "bf16"
    checkpointing: bool = False
    overlap: float = 1.0
    machines: Machines = H100

    def __post_init__(self) -> None:
        sizes_of(self.model)
        for name, allowed in (("strategy", STRATEGIES), ("precision", PRECISIONS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(allowed)}")
        for name, least in (("ranks", 1), ("length", 0), ("micro_batch", 1), ("batch", 0)):
            whole(name, getattr(self, name), least)
        self.sizes.check_length(self.length)
        if self.ranks > MOST_RANKS:
            raise ValueError(f"ranks is {self.ranks}: at most {MOST_RANKS}")
        if self.batch and self.ranks > self.batch:
            raise ValueError(f"ranks is {self.ranks}: with a batch of {self.batch}, at most one for each sample")
        if not isinstance(self.checkpointing, bool):
            raise ValueError(f"checkpointing is {self.checkpointing!r}: it must be True or False")
        number("overlap", self.overlap, zero=True)
        if self.overlap > 1:
            raise ValueError(f"overlap is {self.overlap!r}: it must be a number from 0 to 1")
        if not isinstance(self.machines, Machines):
            raise ValueError(f"machines is {self.machines!r}: it must be Machines(...)")

    @property
    def sizes(self) -> Model:
        return sizes_of(self.model)

    @property
    def accounts(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def samples(self) -> int:
        """Of one step on the rank that has most."""
        return -(-self.batch // self.ranks) or self.micro_batch

    @property
    def passes(self) -> int:
        """Forward and backward passes in a step: gradients are accumulated."""
        return -(-self.samples // self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of one step on that rank."""
        return self.samples * (self.length or self.sizes.length)


@dataclass(frozen=True)
class Step:
    """A predicted step of one rank, in seconds.

    computing : forward and backward of all passes.
    sending   : the links are busy: bytes / bandwidth.
    hopping   : the links are busy: hops x latency.
    waiting   : nothing is computed, since a collective is not done.
    """

    setup: Setup
    computing: float
    sending: float
    hopping: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting

    @property
    def link(self) -> float:
        return self.sending + self.hopping

    @property
    def efficiency(self) -> float:
        """Share of the step in which the device computes."""
        return self.computing / self.seconds if self.seconds else 1.0

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        return assumptions(self.setup)

    def __str__(self) -> str:
        return "\n".join([*table([self]), "", "Assumed:", *(f"  {words}" for words in self.assumptions)])


def predict(setup: Setup) -> Step:
    """One step of that setup."""
    model, n, machines = setup.sizes, setup.ranks, setup.machines
    length, passes = setup.length or model.length, setup.passes
    work = flops.count(model, setup.tokens / passes, length, setup.checkpointing)
    computing = work.total / (1e12 * machines.teraflops)
    waiting = link = hopping = 0.0
    for last, times in ((False, passes - 1), (True, 1)):
        plan = schedule(setup.strategy, model, n, setup.accounts, work, computing, last=last)
        if times and plan.asked:
            busy = plan.charged(machines)
            waits = max(0.0, plan.seconds(machines) - computing)
            waiting += times * (waits + (1 - setup.overlap) * (busy - waits))
            link += times * busy
            hopping += times * sum(machines.latency(one.name, n) for one in plan.asked)
    return Step(setup, passes * computing, link - hopping, hopping, waiting)


def sweep(setup: Setup, ranks: Iterable[int] = RANKS) -> list[Step]:
    """The same on other numbers of ranks; with a batch, as far as it has a sample for each."""
    return [predict(replace(setup, ranks=n)) for n in ranks if not setup.batch or n <= setup.batch]


def assumptions(setup: Setup) -> tuple[str, ...]:
    """What a prediction for that setup takes for granted, in words."""
    m, again = setup.machines, "8 (checkpointing)" if setup.checkpointing else "6"
    rule = {
        "nccl": "an all-reduce takes the faster of ring and tree, its halves a ring",
        "ring": "every collective is a ring",
        "tree": "every collective is a tree",
    }[m.algorithm]
    return (
        f"Computing: {again} x parameters x tokens + attention (arXiv 2204.02311, appendix B), at {m.teraflops:g} TFLOP/s.",
        f"Bytes: an ideal ring, {m.inside:g} GB/s in a node of {m.devices}; across nodes the slower of that and "
        f"{m.between:g} GB/s out of each node.",
        f"Hops: {m.latency_inside:g} us in a node, {m.latency_between:g} us between nodes; {rule} (NCCL, tuning.cc).",
        f"Overlap: one collective at a time, when the strategy's code asks for it; {setup.overlap:.0%} of what could hide hides.",
        "Same batch on each rank, however many ranks."
        if not setup.batch
        else f"{setup.batch:,} samples in a step on all ranks together, at most {setup.micro_batch} in a pass.",
        "Not in it: stragglers, failures, other traffic, the optimizer's own time, reading data; whether memory suffices.",
    )


def table(steps: Sequence[Step]) -> list[str]:
    """Lines of text: a head, and one line for each step."""
    names = ("computing", "bytes", "hops", "waiting", "step")
    columns = " ".join(f"{name:>10}" for name in names)
    lines = [f"{'model':14} {'strategy':17} {'ranks':>9} {'passes':>6} {columns} efficiency"]
    for one in steps:
        times = (one.computing, one.sending, one.hopping, one.waiting, one.seconds)
        shown = " ".join(f"{1e3 * seconds:>7,.3g} ms" if seconds < 1 else f"{seconds:>8,.3g} s" for seconds in times)
        what = f"{one.setup.sizes.name:14} {one.setup.strategy:17} {one.setup.ranks:>9,} {one.setup.passes:>6,}"
        lines.append(f"{what} {shown} {one.efficiency:>10.0%}")
    return lines


MACHINES = (
    "devices in a node", "GB/s between devices of a node", "GB/s out of a node", "microseconds of a hop in a node",
    "microseconds of a hop between nodes", "1e12 operations a second of one device", "nccl, ring or tree",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print predictions for the command line's setup, on each number of ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m chapter19_9.choosing.scaling", description="Step time and efficiency on many ranks, predicted."
    )
    parser.add_argument("--model", default=Setup.model, help=f"one of {', '.join(PRESETS)} (default: {Setup.model})")
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=["ddp", "fsdp2_no_reshard", "fsdp2"],
        help=f"one or several of {', '.join(STRATEGIES)}",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="one or several (default: 8 to 100,000)")
    for field, words in (
        ("length", "tokens of a sample (default: the model's)"), ("micro_batch", "samples of one rank at once"),
        ("batch", "samples on all ranks together (default: a micro-batch on each)"),
    ):  # fmt: skip
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=getattr(Setup, field), help=words)
    parser.add_argument("--precision", default=Setup.precision, help="fp32 or bf16")
    parser.add_argument("--checkpointing", action="store_true", help="compute each block's forward again")
    parser.add_argument("--overlap", type=float, default=Setup.overlap, help="share of what could hide that does")
    for one, words in zip(fields(Machines), MACHINES, strict=True):
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default,
            help=f"{words} (default: {one.default})",
        )  # fmt: skip
    values = vars(parser.parse_args(arguments))
    strategies, ranks = values.pop("strategy"), values.pop("ranks")
    try:
        machines = Machines(**{one.name: values.pop(one.name) for one in fields(Machines)})
        setups = [Setup(strategy=name, machines=machines, ranks=min(ranks), **values) for name in strategies]
        steps = [step for setup in setups for step in sweep(setup, sorted(ranks))]
    except ValueError as error:
        parser.error(str(error))
    print(*table(steps), "", "Assumed:", *(f"  {words}" for words in steps[0].assumptions), sep="\n")


if __name__ == "__main__":
    main()
