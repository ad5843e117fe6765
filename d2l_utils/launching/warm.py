"""The helper process that makes launching fast: it has imported what every rank needs, and forks once per launch.

Run by file path (`python -P warm.py CONTROL_FD`), never imported by a kernel: it must know third-party packages only, so that a
lesson module edited a moment ago is never stale in a rank. It holds no threads and no accelerator, which is what makes its
forks safe. Each message on the control socket is the path of a request file plus the descriptor of that launch's own channel; the
forked child becomes the launch's supervisor (supervisor.py). End of file on the control socket means that the kernel is gone.

What has imported torch takes some 400 MB. After ten minutes without a launch this process therefore replaces itself by a small
Python that only waits (`python -S -P warm.py CONTROL_FD FOLDER idle`); the next request turns that one into a helper again.

Environment: D2L_HELPER_IDLE, the seconds after which an unused helper gives back its memory (600).
"""

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import site
import socket
import sys
import time
import types
from typing import Any

# In the order in which they cost most. The first optimizer step would otherwise import torch._dynamo in every rank, for seconds.
PRELOAD = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.nn.parallel",
    "numpy",
    "psutil",
    "runpy",
    "pickle",
)


IDLE_MARK = "helper.idle"  # a file in the kernel's folder while the helper has given back its memory

generators: list[Any] = []
main_process = multiprocessing.current_process()


def preload(parent: int, folder: str) -> None:
    """Import everything once. Leaves at once when the kernel died meanwhile."""
    gc.disable()  # what is imported here stays: looking for garbage meanwhile only costs time
    for name in PRELOAD:
        if os.getppid() != parent:
            leave(folder)
        try:
            importlib.import_module(name)
        except ImportError:  # a name that this torch does not have: the rank that needs it will say so
            continue
    # torch.distributed loads torchrun's plug-ins, ours among them: forget it, or its code would be the one of now, for ever.
    for name in [n for n in sys.modules if n.partition(".")[0] in ("d2l_utils", "chapter19_9")]:
        del sys.modules[name]
    # What an import has seeded would give every rank the same numbers: forked.py seeds it anew in each rank.
    numpy = importlib.import_module("numpy.random")
    kinds = {random.Random, numpy.RandomState, numpy.Generator}
    generators[:] = [thing for thing in gc.get_objects() if type(thing) in kinds]
    gc.enable()
    gc.freeze()  # the forks then share these pages instead of copying them at their first collection


class KeptBytecode(importlib.machinery.SourceFileLoader):
    """Keeps bytecode in ``folder`` where Python's own cannot be used: every rank of every launch would compile the chapter again,
    which takes as long as some training steps."""

    folder: str | None = None

    def get_code(self, fullname: str) -> types.CodeType | None:
        if pythons_own_is_current(self.path):
            return importlib.machinery.SourceFileLoader(fullname, self.path).get_code(fullname)
        own = sys.pycache_prefix, sys.dont_write_bytecode
        sys.pycache_prefix, sys.dont_write_bytecode = self.folder, False
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = own

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Python would make the kernel's folder anew where it was removed meanwhile, and nobody would remove that."""
        at = str(self.folder)
        with contextlib.suppress(OSError):
            for part in ("", *os.path.relpath(os.path.dirname(path), at).split(os.sep)):
                at = os.path.join(at, part)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(at)
            draft = f"{path}.{os.getpid()}"
            with open(draft, "xb") as file:
                file.write(data)
            os.replace(draft, path)

    def path_stats(self, path: str) -> dict[str, float]:
        """Microseconds where Python has seconds: a module edited twice within one is not stale."""
        return {**super().path_stats(path), "mtime": os.stat(path).st_mtime_ns // 1000}


def pythons_own_is_current(source: str) -> bool:
    """Whether Python's own bytecode serves: it may be written, and is not from the second in which the source was written last.

    Python compares whole seconds: a module that a cell writes twice within one would be the older one in the ranks.
    """
    if sys.dont_write_bytecode:
        return False
    try:
        compiled = importlib.util.cache_from_source(source)
        written = os.stat(compiled).st_mtime_ns if os.path.exists(compiled) else time.time_ns()
        writable = os.path.exists(compiled) or sys.pycache_prefix or os.access(os.path.dirname(source), os.W_OK)
        return bool(writable) and written > os.stat(source).st_mtime_ns + 1_000_000_000
    except (OSError, NotImplementedError):
        return False


def keep_bytecode(folder: str) -> None:
    """For what this process and its forks import from now on. What pip has installed has its bytecode already."""
    KeptBytecode.folder = folder
    kinds = importlib.machinery
    hook = kinds.FileFinder.path_hook(
        (kinds.ExtensionFileLoader, kinds.EXTENSION_SUFFIXES),
        (KeptBytecode, kinds.SOURCE_SUFFIXES),
        (kinds.SourcelessFileLoader, kinds.BYTECODE_SUFFIXES),
    )
    installed = tuple({os.path.dirname(os.__file__), *site.getsitepackages()})

    def here(path: str) -> Any:
        if path.startswith(installed):
            raise ImportError("left to Python's own finder")
        return hook(path)

    sys.path_hooks.insert(0, here)
    sys.path_importer_cache.clear()


def leave(folder: str) -> None:
    """Remove the kernel's folder and end. It goes under another name first, where ranks that have not heard of it yet put
    nothing more."""
    with contextlib.suppress(OSError):
        os.rename(folder, f"{folder}.gone")
    for name in (f"{folder}.gone", folder):
        shutil.rmtree(name, ignore_errors=True)
    os._exit(0)  # nothing is left to tidy up, and torch's own ending takes a while


def threads() -> int:
    """Number of threads of this process, as Linux counts them."""
    return len(os.listdir("/proc/self/task"))


def become_supervisor(request_path: str, channel: socket.socket) -> None:
    """In the forked child: take on the kernel's environment, folder and import path, and run the launch. Never returns."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(request_path, encoding="utf-8") as file:
            request = json.load(file)
        sys.path[:] = request["path"]
        keep_bytecode(os.path.join(os.path.dirname(request["folder"]), "bytecode"))
        from d2l_utils.launching import limits, supervisor  # only now: their newest source

        limits.take(request["limits"])
        status = supervisor.run(request, channel, warm=True)
    except BaseException:
        import traceback

        with open(os.path.join(os.path.dirname(request_path), "supervisor.log"), "a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
    finally:
        os._exit(status)


def main(control_fd: int, folder: str) -> None:
    """Serve launches until the kernel closes the control socket; then remove the kernel's folder and leave."""
    control = socket.socket(fileno=control_fd)
    sys.modules["d2l_warm"] = sys.modules["__main__"]  # by this name its forks know that they are forks
    preload(os.getppid(), folder)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended supervisors leave no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch = sys.modules["torch"]
    # After a rest nobody reads this any more, and a socket that is full must not stop the helper.
    with contextlib.suppress(OSError):
        state = {"threads": threads(), "accelerator": torch.cuda.is_initialized()}
        control.send(json.dumps(state).encode(), socket.MSG_DONTWAIT)
    patience = min(float(os.environ.get("D2L_HELPER_IDLE") or "600"), 1e9)  # select does not take much more
    while True:
        if not select.select([control], [], [], patience)[0]:
            become(control, folder, "idle")
        message: bytes = b""
        with contextlib.suppress(ConnectionError):  # the kernel was killed before it heard that word
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            break
        pid = os.fork()
        if pid == 0:
            control.close()
            become_supervisor(message.decode(), socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
    leave(folder)  # the supervisors see the end of their own channels and stop their ranks


def become(control: socket.socket, folder: str, *role: str) -> None:
    """Replace this process by another one that runs this file; never returns."""
    with contextlib.suppress(OSError):
        mark = os.path.join(folder, IDLE_MARK)
        open(mark, "x").close() if role else os.unlink(mark)
    control.set_inheritable(True)
    lean = ["-S"] if role else []
    os.execv(sys.executable, [sys.executable, *lean, "-P", __file__, str(control.fileno()), folder, *role])


def wait(control_fd: int, folder: str) -> None:
    """Do nothing until a request comes, which stays in the socket for the helper that this process then becomes."""
    control = socket.socket(fileno=control_fd)
    message = b""
    with contextlib.suppress(ConnectionError):
        message = control.recv(1, socket.MSG_PEEK)
    if not message:
        leave(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become(control, folder)


if __name__ == "__main__":
    (wait if sys.argv[3:] == ["idle"] else main)(int(sys.argv[1]), sys.argv[2])
