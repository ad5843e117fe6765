"""The process of a dry run: a plan on standard input, its progress and what was found on standard output, a line each.

Standard input stays open as long as somebody waits: at its end this process leaves at once.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
import warnings
from typing import TextIO


def main() -> None:
    """Serve one plan."""
    begun = time.time()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints must not stand among the lines
    plan_line = sys.stdin.readline()
    threading.Thread(target=leave_with, args=(sys.stdin,), daemon=True).start()
    gc.disable()  # looking for garbage among imports and views costs a second, and there is none
    warnings.filterwarnings("ignore")
    from chapter19_9.dryrun.plan import Plan
    from chapter19_9.dryrun.step import pretend

    plan, told = Plan.from_json(json.loads(plan_line)), 0.0

    def tell(what: str, done: float) -> None:
        nonlocal told
        if (now := time.monotonic()) - told > 0.05:
            told = now
            print(json.dumps({"at": [what, done]}), file=out)

    parameters, rest, curve, collectives = pretend(plan, tell)
    from chapter19_9.dryrun.outcome import DryRun

    used = resource.getrusage(resource.RUSAGE_SELF)
    memory = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cpu = used.ru_utime + used.ru_stime
    found = DryRun(plan, parameters, rest, curve, collectives, time.time() - begun, cpu, memory)
    print(json.dumps({"found": found.to_json()}), file=out, flush=True)
    os._exit(0)  # nothing is left to tidy up, and torch's own ending takes a while


def leave_with(line: TextIO) -> None:
    """End this process when the other end of the line is gone."""
    while line.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
