"""Standard output of one thread, sent to a panel's own area.

A widget's run prints while the reader works in another cell. ipywidgets' Output is no help: it takes over the
output of whatever cell happens to run, not that of a thread.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_routes: dict[int, Callable[[str], object]] = {}


class _ByThread:
    """Stands in for sys.stdout while any capture is on; other threads' text goes where it always went."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def write(self, text: str) -> int:
        route = _routes.get(threading.get_ident())
        if route is None:
            return self.original.write(text)
        route(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@contextmanager
def printed_here(to: Callable[[str], object]) -> Iterator[None]:
    """What the calling thread prints inside the block goes to `to`, text by text."""
    me = threading.get_ident()
    with _lock:
        if not isinstance(sys.stdout, _ByThread):
            sys.stdout = _ByThread(sys.stdout)
        outer = _routes.get(me)
        _routes[me] = to
    try:
        yield
    finally:
        with _lock:
            if outer is None:
                del _routes[me]
            else:
                _routes[me] = outer
            if not _routes and isinstance(sys.stdout, _ByThread):
                sys.stdout = sys.stdout.original
