"""In which collectives a rank is. torch's flight recorder knows it, of what Python launched and of what C++ did (DDP's reducer).

A rank that waits sits in C++ and runs no Python of its main thread. So a thread sleeps in the opening of a named pipe, which costs
nothing, until the supervisor opens the other end to ask. A child that the rank forks does not inherit it.
"""

import contextlib
import json
import linecache
import os
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_KEPT = 200  # calls that a rank tells of each group, the newest


@dataclass(frozen=True)
class CollectiveCall:
    """One launched collective. number: counted from 1 in its group and backend. members: global ranks, empty where unknown."""

    group: str
    number: int
    name: str
    pending: bool = field(compare=False)
    members: tuple[int, ...] = field(default=(), compare=False)


@dataclass
class CollectiveState:
    """What a rank has launched, oldest first; and in which call its main thread waits that the recorder does not see (send, recv)."""

    calls: list[CollectiveCall] = field(default_factory=list)
    waits_in: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> "CollectiveState":
        content = json.loads(text)
        calls = [CollectiveCall(**{**call, "members": tuple(call["members"])}) for call in content["calls"]]
        return cls(calls, content["waits_in"])


def answer_requests(request: Path, answer: Path) -> None:
    """Have a thread write this rank's CollectiveState to `answer` each time that somebody opens the named pipe `request`."""
    try:
        request.unlink(missing_ok=True)  # of the life before
        os.mkfifo(request, 0o600)
        threading.Thread(target=_answer, args=(request, answer), daemon=True, name="d2l-state").start()
    # Windows, a file system without named pipes, or a limit on threads: the stacks alone must do.
    except (AttributeError, OSError, RuntimeError):
        return


def _answer(request: Path, answer: Path) -> None:
    from d2l_utils.launching import ranks

    # The folder is gone, and with it whoever could ask; or another torch keeps other records. A thread must not print that.
    with contextlib.suppress(Exception):
        while True:
            with request.open("rb") as pipe:
                pipe.read()
            ranks.write_json(answer, asdict(current_state()))


def ask(folder: str, seconds: float) -> None:
    """Ask each rank of a launch, and wait up to `seconds` for the answers."""
    asked = []
    for name in os.listdir(folder):
        if name.endswith(".ask"):
            with contextlib.suppress(OSError):  # nobody reads: the rank has ended, or does not listen yet
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_NONBLOCK))
                asked.append(os.path.join(folder, f"{name.removesuffix('.ask')}.collectives"))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(map(os.path.exists, asked)):
        time.sleep(0.01)


def current_state() -> CollectiveState:
    """This process's state. Called beside the main thread."""
    recorder = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    members = _members()
    entries = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(recorder, dump):
            entries += json.loads(getattr(recorder, dump)()).get("entries", [])
    entries = sorted(
        (entry for entry in entries if not entry.get("is_p2p")), key=lambda entry: entry["time_created_ns"]
    )
    calls: list[CollectiveCall] = []
    count: Counter[str] = Counter()
    for call in (_call(entry, members) for entry in reversed(entries)):
        count[call.group] += 1
        if count[call.group] <= _KEPT or call.pending:
            calls.insert(0, call)
    return CollectiveState(calls, _uncounted_wait())


def _call(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> CollectiveCall:
    backend, _, name = entry["profiling_name"].rpartition(":")
    group = entry["process_group"][0]
    pending = not entry["retired"] and entry["state"] != "completed"
    return CollectiveCall(f"{group} {backend}", entry["collective_seq_id"], name, pending, members.get(group, ()))


def _members() -> dict[str, tuple[int, ...]]:
    """Global ranks by group name, of the groups that this rank is in."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    found = {}
    with contextlib.suppress(Exception):  # private names of torch: without them every rank counts as a member
        for group, name in list(world.pg_names.items()):  # type: ignore[union-attr]
            found[name] = tuple(sorted(world.pg_group_ranks[group]))  # type: ignore[union-attr]
    return found


def _uncounted_wait() -> str:
    """The call in which the main thread stands, if it is a `wait()` of C++: point-to-point requests are not recorded by gloo."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    line, end, first, last = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or line != end:
        return ""
    call = linecache.getline(frame.f_code.co_filename, line).encode()[first:last].decode(errors="replace")
    return "send or recv" if re.fullmatch(r"(?!os\.).*\.wait\(.*\)", call) else ""
