"""What makes a rank that was forked from the warm helper like one that was started as a program of its own.

A fork has what its parent's imports have seeded, pinned and cached. The environment, the import path, the limits and the
signals are set by the processes above the rank; the rest is here. What cannot be set again, since Python reads it once, is
the same in both: `environment.for_ranks` gives all ranks one seed of str's hash, and the helper is started anew when a
variable of `environment.read_at_start` has changed.
"""

import ctypes
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import sys
from typing import Any


def is_fork() -> bool:
    """Whether this process was forked from the warm helper."""
    return "d2l_warm" in sys.modules


def start_afresh() -> None:
    """Set this fork's generators, threads and multiprocessing to what a program finds when it starts."""
    import torch

    torch.default_generator.seed()
    for generator in sys.modules["d2l_warm"].generators:
        _seed(generator)
    wish = os.environ.get("OPENBLAS_NUM_THREADS", "")
    wish = wish if wish.isdecimal() and int(wish) else os.environ["OMP_NUM_THREADS"]
    _set_openblas_threads(min(int(wish), len(os.sched_getaffinity(0))))  # as it does itself when it is loaded
    # A rank that is started as a program leads a session: what it sends to its process group reaches nobody else's processes.
    if os.getsid(0) != os.getpid():
        os.setsid()
    # torchrun has made this process with multiprocessing, which would show as a child's name and a start method that
    # can no longer be chosen.
    private: Any = multiprocessing.process
    private._parent_process, private._current_process = None, sys.modules["d2l_warm"].main_process
    private._current_process._config["authkey"] = private.AuthenticationString(os.urandom(32))
    multiprocessing.context._default_context._actual_context = None  # type: ignore[attr-defined]


def _seed(generator: Any) -> None:
    """Seed one of Python's or numpy's generators from the operating system."""
    if hasattr(generator, "seed"):
        generator.seed()
    else:  # numpy's newer kind, which is made anew
        fresh = type(generator.bit_generator)()
        generator.bit_generator.state = fresh.state


def _set_openblas_threads(number: int) -> None:
    """Threads of numpy's matrix products. The helper holds one thread, since it could not be forked with more."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        libraries = {line.split(maxsplit=5)[-1].strip() for line in maps if "openblas" in line}
    for library in libraries:
        loaded = ctypes.CDLL(library)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(loaded, name):
                getattr(loaded, name)(number)
                break
