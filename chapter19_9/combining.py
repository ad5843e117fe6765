"""What can be combined with what, and what a precision makes of each strategy's bytes. Needs no torch.

    check("zero1", precision="bf16", accumulation=4)

Where 16 bits come in is the registry's ``mixed``: by autocast, as 16-bit copies, or as 16-bit gathered weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from chapter19_9 import strategies

if TYPE_CHECKING:
    from chapter19_9.strategies import Strategy

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Elements:
    """Bytes of one number, by what it is for.

    parameters, gradients : at rest.
    master                : of the float32 weights that the optimizer keeps beside 16-bit ones; 0: none.
    unscaled              : of the float32 gradients beside 16-bit ones, where a loss scale was divided out; 0: none.
    gathered, reduced     : on the way, of parameters and of gradients.
    """

    parameters: int = 4
    gradients: int = 4
    master: int = 0
    unscaled: int = 0
    gathered: int = 4
    reduced: int = 4


def elements(strategy: Strategy | str, precision: str = "fp32") -> Elements:
    """Bytes of one number under a strategy and a precision. ValueError for an unknown one."""
    facts = strategies.get(strategy) if isinstance(strategy, str) else strategy
    check_precision(precision)
    if precision == "fp32" or facts.mixed == "autocast":
        return Elements()
    reduced = 4 if facts.reduces == "float32" else 2
    if facts.mixed == "copies":
        return Elements(2, 2, 4, 4 if precision == "fp16" else 0, gathered=2, reduced=reduced)
    return Elements(gathered=2, reduced=reduced)


def check_precision(precision: object) -> None:
    """ValueError unless it is the name of a precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}")


def check(
    strategy: str,
    *,
    precision: str = "fp32",
    accumulation: int = 1,
    sync_every: bool | None = None,
    average: bool = False,
    options: Collection[str] = (),
) -> None:
    """ValueError that names the argument and what to use instead, when these do not go together; the arguments are
    those of ``train``, ``options`` the names of the strategy's own. Cheap: call it before any process starts."""
    facts = strategies.get(strategy)
    check_precision(precision)
    if precision != "fp32" and "dtype" in options:
        raise ValueError(f"precision is {precision!r} and options has 'dtype': both say it, give precision alone")
    if facts.extra and precision != "fp32":
        raise ValueError(f"precision is {precision!r}: strategy {strategy!r} goes through this loop in fp32 only")
    if facts.extra and sync_every:
        raise ValueError(
            f"sync_every is True: strategy {strategy!r} would begin its gradients anew with every backward; leave it out"
        )
    if average and facts.gradients == "sharded":
        raise ValueError(
            f"average is True: strategy {strategy!r} averages gradients itself, and keeps only shards of them"
        )
    if sync_every and facts.window == "step":
        raise ValueError(
            f"sync_every is True: strategy {strategy!r} exchanges no gradients in backward; leave it out, or use 'ddp'"
        )
    if sync_every is False and facts.window == "pass" and accumulation > 1:
        raise ValueError(
            f"sync_every is False: strategy {strategy!r} reduces gradients in every backward, since what waited would "
            "have to be whole; leave it out, or use 'zero1' or 'fsdp2'"
        )
