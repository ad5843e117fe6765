"""When Python looks for garbage: not while somebody waits for a picture."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """No search for garbage inside the ``with`` block, where one was to be expected.

    A full one goes through everything that a kernel has imported: with torch, that is a third of a second, and reading
    some thousand events or drawing a sheet sets it off. It comes after the block, when nobody waits.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
