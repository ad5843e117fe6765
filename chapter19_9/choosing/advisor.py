"""What to start with: a model and machines in, a strategy out, with the numbers behind it (19.9.12).

    answer = advise(Question(model=PRESETS["llama-7b"], memory=80, devices=8, nodes=1))
    print(answer)

In a terminal: ``python -m chapter19_9.choosing.advisor --help``. Figures are ``cost``'s, which for the toy Transformer are held
against what ranks measure; for other models they are predictions, and ``ASSUMPTIONS`` go with them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from chapter19_9.choosing import cost, lines
from chapter19_9.choosing.cost import BF16, PRECISIONS, Moment, Precision
from chapter19_9.choosing.machines import Machines
from chapter19_9.choosing.presets import PRESETS, Model, own, sizes_of, whole
from chapter19_9.choosing.scaling import MOST_RANKS, Setup, Step, predict

ASSUMPTIONS = (
    "Saved activations: fused attention, no dropout: arXiv 2205.05198, equation 1, without masks and s x s matrices.",
    "Checkpointing keeps each block's input, and computes one block at a time again.",
    "bf16 is 2 + 2 + 12 bytes a parameter (arXiv 1910.02054); DDP under autocast keeps a 16-bit cast of each weight more.",
    "The loss is taken in 32 bits over the whole micro-batch; the optimizer is fused.",
    "FSDP2 gathers one block ahead in backward, through a buffer.",
)


@dataclass(frozen=True)
class Question:
    """A model and the machines for it.

    model         : sizes, or the name of one in ``PRESETS``.
    length        : tokens of one sample; 0 takes the model's own.
    micro_batch   : samples that one rank computes with at once.
    precision     : "fp32", or "bf16" for mixed precision.
    checkpointing : keep only each block's input for backward.
    memory        : of one device, in GB (1e9 bytes).
    devices, nodes: devices in a node, and nodes.
    inside        : GB/s from one device to another in its node.
    between       : GB/s out of a node, by all its links.
    reserve       : share of the memory that is left to the framework, and to gaps.
    teraflops     : 1e12 operations a second of one device when it only computes.

    Raises ValueError that names the field.
    """

    model: Model | str = "llama-7b"
    length: int = 0
    micro_batch: int = 1
    precision: str = "bf16"
    checkpointing: bool = False
    memory: float = 80.0
    devices: int = 8
    nodes: int = 1
    inside: float = Machines.inside
    between: float = Machines.between
    reserve: float = 0.1
    teraflops: float = Machines.teraflops

    def __post_init__(self) -> None:
        sizes_of(self.model)
        whole("length", self.length, 0)
        self.sizes.check_length(self.length)
        for name in ("micro_batch", "devices", "nodes"):
            whole(name, getattr(self, name), 1)
        if self.ranks > MOST_RANKS:
            raise ValueError(f"nodes is {self.nodes}: with {self.devices} devices each, at most {MOST_RANKS} in all")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}: it must be one of {', '.join(PRECISIONS)}")
        if not isinstance(self.checkpointing, bool):
            raise ValueError(f"checkpointing is {self.checkpointing!r}: it must be True or False")
        for name in ("memory", "inside", "between", "teraflops"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a number above 0")
        if isinstance(self.reserve, bool) or not isinstance(self.reserve, int | float) or not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is {self.reserve!r}: it must be a number from 0 to below 1")

    @property
    def sizes(self) -> Model:
        return sizes_of(self.model)

    @property
    def ranks(self) -> int:
        return self.devices * self.nodes

    @property
    def tokens(self) -> int:
        """Tokens of one rank's micro-batch."""
        return self.micro_batch * (self.length or self.sizes.length)

    @property
    def accounts(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def machines(self) -> Machines:
        return Machines(self.devices, self.inside, self.between, teraflops=self.teraflops)

    @property
    def room(self) -> float:
        """Bytes of one device that may be filled."""
        return 1e9 * self.memory * (1 - self.reserve)


@dataclass(frozen=True)
class Option:
    """One way to train, weighed. ``peak``: the fullest moment; ``sent``: bytes of one rank and step."""

    setup: Setup
    peak: Moment
    sent: float
    fits: bool

    @property
    def strategy(self) -> str:
        return self.setup.strategy

    @property
    def checkpointing(self) -> bool:
        return self.setup.checkpointing

    @cached_property
    def time(self) -> Step:
        """Its step in seconds."""
        return predict(self.setup)

    @property
    def title(self) -> str:
        return lines.SHORT[self.strategy] + (" + checkpointing" if self.checkpointing else "")


def candidates(question: Question) -> list[str]:
    """From the most kept to the least, by names of the registry. One rank has nothing to share."""
    if question.ranks == 1:
        return ["single"]
    # PyTorch's own keeps 32-bit weights and gradients whole; by hand (and in DeepSpeed) those have 16 bits
    first = "zero1" if question.accounts is BF16 else "zero_redundancy"
    return ["ddp", first, "fsdp2_no_reshard", "fsdp2"]


def weigh(question: Question, strategy: str, checkpointing: bool) -> Option:
    """What that strategy would take of one rank."""
    n, model, accounts = question.ranks, question.sizes, question.accounts
    walked = cost.moments(
        strategy, model, n, question.tokens, accounts, checkpointing=checkpointing, every=False
    )  # fmt: skip
    most, sent = cost.peak(walked), cost.sent(strategy, model, n, accounts)
    setup = Setup(
        model, strategy, n, question.length, question.micro_batch, precision=question.precision,
        checkpointing=checkpointing, machines=question.machines,
    )  # fmt: skip
    return Option(setup, most, sent, most.total <= question.room)


@dataclass(frozen=True)
class Answer:
    """options: what was weighed, in the order in which it was asked; chosen: the first that fits, or None."""

    question: Question
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option | None:
        return next((option for option in self.options if option.fits), None)

    @property
    def strategy(self) -> str | None:
        """The recommended start, by its name in the registry."""
        return self.chosen.strategy if self.chosen else None

    @property
    def asked(self) -> tuple[Option, ...]:
        """The options up to the chosen one: the path through the flow."""
        return self.options[: self.options.index(self.chosen) + 1] if self.chosen else self.options

    @cached_property
    def next(self) -> str | None:
        """When nothing fits: the technique to look at next."""
        from chapter19_9.choosing.what_if import beyond

        return None if self.chosen else beyond(self.question, self.options[-1])

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """What would change the answer."""
        from chapter19_9.choosing.what_if import changes

        return tuple(changes(self))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures take for granted: bytes, then times."""
        return (*ASSUMPTIONS, *(self.chosen or self.options[-1]).time.assumptions)

    @property
    def lines(self) -> str:
        """PyTorch for the chosen option; empty when nothing fits."""
        return (
            lines.write(self.chosen.strategy, self.question.precision, self.chosen.checkpointing) if self.chosen else ""
        )

    @property
    def activations(self) -> tuple[float, float]:
        """Bytes of saved activations at the end of forward: without checkpointing, and with."""
        q = self.question
        without, with_ = (cost.activations(q.sizes, q.tokens, q.accounts.element, each) for each in (False, True))
        return without, with_

    def __str__(self) -> str:
        from chapter19_9.choosing.text import told

        return told(self)


def advise(question: Question) -> Answer:
    """Weigh the ways to train from the most kept to the least: first as asked, then with checkpointing."""
    lanes = [True] if question.checkpointing else [False, True]
    return Answer(question, tuple(weigh(question, name, lane) for lane in lanes for name in candidates(question)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the advice for the command line's model and machines."""
    parser = argparse.ArgumentParser(
        prog="python -m chapter19_9.choosing.advisor", description="What to start with, and why."
    )
    parser.add_argument("--model", default="llama-7b", help=f"one of {', '.join(PRESETS)} (default: llama-7b)")
    for name in ("layers", "width", "heads", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="own size instead of a preset; the four go together")
    for field, words in (
        ("length", "tokens of a sample (default: the model's)"), ("micro_batch", "samples of one rank at once"),
        ("devices", "devices in a node"), ("nodes", "nodes"),
    ):  # fmt: skip
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=getattr(Question, field), help=words)
    for field, words in (
        ("memory", "GB of one device"), ("inside", "GB/s between devices of a node"),
        ("between", "GB/s out of a node"), ("reserve", "share of the memory left free"),
        ("teraflops", "1e12 operations a second of one device"),
    ):  # fmt: skip
        parser.add_argument(f"--{field}", type=float, default=getattr(Question, field), help=words)
    parser.add_argument("--precision", default="bf16", help="fp32 or bf16")
    parser.add_argument("--checkpointing", action="store_true", help="keep only each block's input for backward")
    values = vars(parser.parse_args(arguments))
    sizes = {name: values.pop(name) for name in ("layers", "width", "heads", "vocabulary")}
    given = {name: value for name, value in sizes.items() if value is not None}
    try:
        if given and len(given) < len(sizes):
            raise ValueError(f"{next(name for name in sizes if name not in given)} is missing: own sizes go together")
        if given:
            values["model"] = own(**given, length=values["length"] or 2048)
        print(advise(Question(**values)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
