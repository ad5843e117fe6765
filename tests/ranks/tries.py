"""What is measured on a machine that others use too."""

from collections.abc import Callable
from typing import Any


def holds(check: Callable[[Any], None], measure: Callable[[int], Any], tries: int = 3) -> None:
    """``check(measure(0))``, measured again where it fails: what else the machine does is noise, and what is wrong is wrong
    each time. ``measure`` gets the number of the attempt, so that tests can share what was measured. Raises what the last
    check raised."""
    for attempt in range(tries):
        try:
            return check(measure(attempt))
        except AssertionError:
            if attempt == tries - 1:
                raise
