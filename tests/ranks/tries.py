"""Measured times on a machine that others use too."""

from collections.abc import Callable
from typing import Any


def holds(check: Callable[[Any], None], measure: Callable[[], Any], tries: int = 3) -> None:
    """``check(measure())``, measured again where it fails: what else the machine does is noise, and what is wrong is wrong
    each time. Raises what the last check raised."""
    for left in reversed(range(tries)):
        try:
            return check(measure())
        except AssertionError:
            if not left:
                raise
