"""Runs a dry run in a process of its own, shows how far it is, and leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from typing import IO, Any

from chapter19_9.dryrun.outcome import DryRun
from chapter19_9.dryrun.plan import Plan
from d2l_utils.launching.environment import for_ranks
from d2l_utils.launching.errors import LaunchError, LaunchStopped, LaunchTimeout, killed_by

WIDTH = 24  # characters of the bar


def dry_run(
    plan: Plan,
    *,
    output: str = "live",
    timeout: float = 300.0,
    stop: threading.Event | None = None,
    stream: IO[str] | None = None,
) -> DryRun:
    """Do ``plan``'s step with tensors that have no data, and bring back what it took.

    output: "live" shows a bar meanwhile, on ``stream`` (default: standard output), and "quiet" nothing. timeout: seconds. stop:
    an event that ends it from another thread. An interrupt, or the end of this process, ends it as well.
    Raises ValueError before any process starts; LaunchError (LaunchTimeout, LaunchStopped) when the process fails.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}: it must be a Plan")
    if output not in ("live", "quiet"):
        raise ValueError(f"output is {output!r}: allowed are 'live' and 'quiet'")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: it must be a number of seconds above 0")
    bar = Bar(None if output == "quiet" else stream or sys.stdout)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "chapter19_9.dryrun.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # "cpu" hides the GPUs: it computes nothing, and AdamW and FSDP2 would make a context on one that they see
        env=for_ranks(os.environ, 1, "", "cpu", sys.path),
        start_new_session=True,  # a Ctrl-C in a terminal is for this process, which then ends that one
        encoding="utf-8",
        errors="replace",
    )
    try:
        return _follow(process, plan, bar, time.monotonic() + timeout, timeout, stop)
    finally:
        process.kill()
        process.wait()
        bar.clear()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _follow(
    process: subprocess.Popen[str],
    plan: Plan,
    bar: Bar,
    deadline: float,
    timeout: float,
    stop: threading.Event | None,
) -> DryRun:
    assert process.stdin and process.stdout and process.stderr
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    # two pipes at once: a full one that nobody reads would stop the process
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True),
        threading.Thread(target=lambda pipe: said.append(pipe.read()), args=(process.stderr,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        process.stdin.write(json.dumps(plan.to_json()) + "\n")
        process.stdin.flush()  # left open: its end tells the process that this one is gone
    except BrokenPipeError:
        pass  # it says why on its own
    bar.show("start", 0.0)
    while True:
        if stop is not None and stop.is_set():
            raise LaunchStopped("stopped: the dry run had not finished")
        if time.monotonic() > deadline:
            raise LaunchTimeout(f"timed out after {timeout:g} s: the dry run was at {bar.at}")
        try:
            line = lines.get(timeout=0.05)
        except queue.Empty:
            continue
        if line is None:
            raise _failure(process, readers[1], said)
        message = json.loads(line)
        if "found" in message:
            return DryRun.from_json(message["found"])
        bar.show(*message["at"])


def _read(pipe: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def _failure(process: subprocess.Popen[str], reader: threading.Thread, said: list[str]) -> LaunchError:
    code = process.wait(10)
    reader.join(10)
    text = "".join(said).strip()
    if code < 0:
        return LaunchError(f"the dry run was killed by {killed_by(code)}", kind="signal")
    last = text.splitlines()[-1] if text else f"exit status {code}"
    return LaunchError(f"the dry run failed: {last}\n\n{text}")


class Bar:
    """A line that is drawn over itself, and gone at the end."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.at, self._drawn, self._time = stream, "start", 0, 0.0

    def show(self, what: str, done: float) -> None:
        self.at = what
        if self.stream is None or time.monotonic() - self._time < 0.1:
            return
        full = round(WIDTH * min(1.0, done))
        line = f"[{'#' * full}{'.' * (WIDTH - full)}] {what}"
        self.stream.write(f"\r{line.ljust(self._drawn)}")
        self.stream.flush()
        self._drawn, self._time = max(self._drawn, len(line)), time.monotonic()

    def clear(self) -> None:
        if self.stream is not None and self._drawn:
            self.stream.write(f"\r{' ' * self._drawn}\r")
            self.stream.flush()
