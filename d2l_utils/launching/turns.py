"""Whose turn it is: a live panel waits for the launches of cells and other panels, so that ranks do not share the cores.

Launches themselves never wait. So a cell that waits for a panel cannot stand in its own way, and two threads of a
reader's own may launch at once.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Withdrawn", "alone", "counted"]

_LOOK_EVERY = 0.02  # seconds
_QUIET = 0.2  # seconds without a launch after which a cell with several of them is taken to have ended

_running: set[tuple[int, object]] = set()  # launches that are on, by their threads
_panels = threading.Lock()  # held by the panel whose turn it is


class Withdrawn(Exception):
    """The wait for a turn was stopped."""


def counted[**P, R](launch: Callable[P, R]) -> Callable[P, R]:
    """Makes panels wait while the function runs in another thread than theirs."""

    @functools.wraps(launch)
    def counting(*args: P.args, **kwargs: P.kwargs) -> R:
        mine = (threading.get_ident(), object())
        _running.add(mine)
        try:
            return launch(*args, **kwargs)
        finally:
            _running.discard(mine)

    return counting


@contextlib.contextmanager
def alone(stop: threading.Event, waiting: Callable[[], object]) -> Iterator[None]:
    """A panel's turn: comes when no other panel has one, and no launch is on in another thread.

    Args:
        stop: ends the wait.
        waiting: called once, if there is something to wait for.

    Raises:
        Withdrawn: `stop` was set before the turn came.
    """
    mine, has_turn, told, free_since = threading.get_ident(), False, False, None
    try:
        while True:
            has_turn = has_turn or _panels.acquire(blocking=False)
            free = has_turn and all(thread == mine for thread, _ in tuple(_running))
            free_since = (free_since or time.monotonic()) if free else None
            if free_since is not None and (not told or time.monotonic() - free_since > _QUIET):
                break
            if not told:
                told = True
                waiting()
            if stop.wait(_LOOK_EVERY):
                raise Withdrawn("stopped while it waited for another launch")
        yield
    finally:
        if has_turn:
            _panels.release()
