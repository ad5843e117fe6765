"""What runs inside a rank: its output, its session, its result, its error.

A script that `launch` wrote ends in `from d2l_utils.launching.worker import run_rank` and `run_rank(function, ...)`. It also works
under plain torchrun, on a laptop or a cluster, with nothing of ours around it; then the results are printed. Under
`launch`, torchrun starts this module with the script as its argument (`main`), which first sets up output, limits and
error reports.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from d2l_utils.launching import environment, forked, host_limits, ranks, results
from d2l_utils.launching.collective_state import answer_requests
from d2l_utils.launching.echo import is_echo
from d2l_utils.launching.meanings import explained

_delivers = False  # whether the script called run_rank; one of the reader's own that does not is done when it ends


def main(arguments: list[str]) -> None:
    """Run `arguments[0]`, a script, as `__main__` with the remaining arguments. Called by torchrun in each rank of a launch."""
    folder, rank = Path(os.environ["D2L_RUN_FOLDER"]), int(os.environ["RANK"])
    # A forked rank inherits torchrun's own handlers, which would turn its end by SIGTERM into an exception of its own,
    # and the place where the agent keeps its temporary files.
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    environment.restore(os.environ)
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)  # the kernel's, however this process was started
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and not ranks.new_life(folder, rank):
        return
    ranks.write(ranks.path(folder, rank, "pid"), str(os.getpid()).encode())
    _capture_output(ranks.path(folder, rank, "log"))
    stack = open(ranks.path(folder, rank, "stack"), "w", encoding="utf-8")
    faulthandler.enable(file=stack)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack)
    answer_requests(ranks.path(folder, rank, "ask"), ranks.path(folder, rank, "collectives"))
    if sys.platform == "linux":
        from d2l_utils.launching.supervisor import die_with_parent

        die_with_parent()
    code = 0
    try:
        _prepare_torch()
        if forked.is_fork():
            if in_bad_fork():
                ranks.write(ranks.path(folder, rank, "badfork"), b"")  # the launcher takes the cold way then
                os._exit(1)
            forked.start_afresh()
        ranks.write(ranks.path(folder, rank, "ready"), b"")
        sys.argv = arguments
        if not forked.is_fork():  # the helper has seen to it for its forks
            from d2l_utils.launching.warm import keep_bytecode

            keep_bytecode(str(folder.parent / "bytecode"))
        script = os.path.abspath(arguments[0])
        if os.path.dirname(script) != str(folder):  # a script of the reader's own imports what lies beside it
            sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
        _done(folder, rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0) and not _delivers:
            _done(folder, rank)
        else:
            code = _report(error, folder, rank)
    with contextlib.suppress(Exception):
        _end_process_group(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # torchrun waits for the return of a rank that it forked. One that it started as a program leaves without the interpreter's
    # own ending, in which FSDP1 now and then aborts after everything was done.
    if code or not forked.is_fork():
        os._exit(code)


def _done(folder: Path, rank: int) -> None:
    """A script that ended by itself has delivered, if only None."""
    if not ranks.path(folder, rank, "result").exists():
        ranks.write(ranks.path(folder, rank, "result"), results.packed(None))


def run_rank(function: Callable[..., Any], /, **arguments: Any) -> None:
    """Call `function(**arguments)` on this rank inside a process group, and deliver what it returns.

    The group is left to the function when it calls `init_process_group` itself; it is always ended here.
    """
    global _delivers
    import torch
    import torch.distributed as dist

    from d2l_utils.device import rank_device
    from d2l_utils.launching import machines

    _delivers = True
    # Read before the function can change them, as a lesson on environment variables may.
    rank, size, place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("D2L_RUN_FOLDER")
    device, process = rank_device(), os.getpid()
    if device.type != "cpu":  # FSDP2 and object collectives take the current device, whatever the tensors are on
        torch.accelerator.set_device_index(device.index)
    with machines.joined():
        if not initialises_process_group(function):
            dist.init_process_group(group_backend(device.type))
        value = function(**arguments)
        if os.getpid() != process:
            os._exit(0)  # a child that the function forked and that came back: the rank is its parent
        if device.type != "cpu":
            # NCCL's calls return at once: what a rank returns counts when its device has done it, or has failed to.
            torch.accelerator.synchronize(device.index)
    if place is None:
        # torchrun's ranks write unbuffered: a line and its end go out together, or another rank's comes between
        print(f"[rank {rank}] {value!r}\n", end="", flush=True)
        _end_process_group(0)
        return
    folder = Path(place)
    results.check_portable(value)
    ranks.write(ranks.path(folder, rank, "result"), results.packed(value))
    _wait_for_others(folder, size)


def group_backend(device_type: str) -> str:
    """What `init_process_group` is given: gloo for tensors on the CPU, and the accelerator's own backend for its tensors."""
    import torch.distributed as dist

    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def in_bad_fork() -> bool:
    """Whether the accelerator's driver was asked in a process above this fork, which makes it unusable here."""
    import torch

    asked = (getattr(torch._C, name, None) for name in ("_cuda_isInBadFork", "_xpu_isInBadFork"))
    return any(question() for question in asked if question is not None)


def initialises_process_group(function: Callable[..., Any]) -> bool:
    """Whether the function, or one that it names in its own module, calls `init_process_group`."""
    seen: set[types.CodeType] = set()

    def look(code: types.CodeType, names: dict[str, Any]) -> bool:
        if code in seen:
            return False
        seen.add(code)
        if "init_process_group" in code.co_names:
            return True
        inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        named = [names[name] for name in code.co_names if isinstance(names.get(name), types.FunctionType)]
        return any(look(c, names) for c in inner) or any(
            look(f.__code__, f.__globals__) for f in named if f.__globals__.get("__name__") == names.get("__name__")
        )

    return isinstance(function, types.FunctionType) and look(function.__code__, function.__globals__)


def _capture_output(log: Path) -> None:
    """Send everything that this rank prints, native code included, to its own file; the kernel reads along."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _prepare_torch() -> None:
    """Threads of this rank, and no word about torch's own renamings, which no reader can act on."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"torch(\..*)?$")
    import torch

    torch.set_num_threads(int(os.environ["D2L_THREADS"]))


def _report(error: BaseException, folder: Path, rank: int) -> int:
    """Write what ended this rank. Returns its exit code."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        ranks.write(ranks.path(folder, rank, "exit"), b"")
        return 0
    # A SyntaxError's own file and line come before its words; notes come after them.
    summary = traceback.format_exception_only(error)[-1 if isinstance(error, SyntaxError) else 0].strip()
    if isinstance(error, SystemExit):
        summary = f"sys.exit({error.code!r})"
        if isinstance(error.code, int) and (line := _last_line(ranks.path(folder, rank, "log"))):
            summary += f"; the last line that it printed is: {line}"  # why a script's arguments are wrong, for example
    try:
        if meaning := explained(error):
            error.add_note(f"What it means: {meaning}.")
        text = reader_traceback(error)
    except Exception:  # an exception may break whoever looks at it
        text = summary
    record = ranks.RankError(summary, text, is_echo(error), time.time(), host_limits.advice(error))
    ranks.write_json(ranks.path(folder, rank, "error"), asdict(record))
    if record.echo:
        _linger(record, folder, rank)
    else:
        _wait_for_last_words(folder, rank)
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and 0 < error.code < 256 else 1


def _last_line(log: Path) -> str:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return lines[-1][-500:] if lines else ""
    return ""


def _linger(record: ranks.RankError, folder: Path, rank: int, seconds: float = 1.0) -> None:
    """Let the rank at fault be seen first: torchrun reports the first process that it sees fail, and takes status 0 for success.

    Whoever is gone meanwhile without a word is named in this rank's own record.
    """
    deadline = time.monotonic() + seconds
    others = [other for other in range(int(os.environ["WORLD_SIZE"])) if other != rank]
    while time.monotonic() < deadline:
        gone = [other for other in others if ranks.gone(folder, other)]
        if gone != record.gone:
            record.gone = gone
            ranks.write_json(ranks.path(folder, rank, "error"), asdict(record))
            deadline = min(deadline, time.monotonic() + 0.5)
        if any(ranks.read(folder, other).delivered for other in others):
            return  # it returned early: nobody has to be waited for
        time.sleep(0.02)


def _wait_for_last_words(folder: Path, rank: int, seconds: float = 0.3) -> None:
    """Let others that fail alike say so before torchrun, which sees this rank's end, ends them."""
    deadline = time.monotonic() + seconds
    others = [other for other in range(int(os.environ.get("WORLD_SIZE", "1"))) if other != rank]
    while time.monotonic() < deadline and not all(ranks.read(folder, other).ended for other in others):
        time.sleep(0.01)


def reader_traceback(error: BaseException) -> str:
    """The traceback from the script's first frame down to the reader's own last line; what lies below it in libraries is counted."""
    text = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = text
    while link is not None:
        _trim(link)
        link = link.__cause__ or link.__context__
    folder = os.environ.get("D2L_RUN_FOLDER")
    return "".join(text.format()).rstrip().replace(f'File "{folder}{os.sep}', 'File "')


def _trim(part: traceback.TracebackException) -> None:
    own = [i for i, frame in enumerate(part.stack) if not ranks.is_library(frame.filename)]
    if not own:
        kept = [frame for frame in part.stack if not _is_ours(frame) and not frame.filename.startswith("<frozen")]
        part.stack[:] = kept
        return
    below = len(part.stack) - own[-1] - 1
    called = [i for i, frame in enumerate(part.stack) if _is_ours(frame) and frame.name == "run_rank"]
    first = (
        called[-1] + 1 if called and called[-1] < own[-1] else own[0]
    )  # the call that launch wrote is not the reader's
    kept = [frame for frame in part.stack[first : own[-1] + 1] if not _is_ours(frame)]
    del part.stack[:]
    part.stack.extend(kept)
    if below:
        part.__notes__ = [
            *(part.__notes__ or []),
            f"({below} more frame{'s' * (below > 1)} inside libraries)",
        ]


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return os.path.abspath(frame.filename) in (os.path.abspath(__file__), os.path.abspath(results.__file__))


def _wait_for_others(folder: Path, size: int, seconds: float = 2.0) -> None:
    """Give the others a moment to deliver: a rank that dies while it is torn down makes torchrun end the rest."""
    missing = [ranks.path(folder, rank, "result") for rank in range(size)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(file.exists() for file in missing):
        time.sleep(0.003)


def _end_process_group(code: int) -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and code == 0:
        dist.destroy_process_group()


if __name__ == "__main__":
    # torchrun runs this file as `__main__`; the script imports it by name. One module must do both.
    from d2l_utils.launching.worker import main as named_main

    named_main(sys.argv[1:])
