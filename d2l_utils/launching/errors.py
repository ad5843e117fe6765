"""What a launch that did not end well raises: the errors, and how they are shown."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from d2l_utils.launching import host_limits


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """IPython shows an error that is raised inside without the launcher's own frames, as it shows a LaunchError."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        words = [f"{type(error).__name__}: {error}"]
        error.__dict__["_render_traceback_"] = lambda: words
        raise


def with_advice[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Where the operating system refuses something to this process, raise OSError that says what to do."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (OSError, MemoryError, ImportError, RuntimeError) as error:
            advice = "" if isinstance(error, LaunchError) else host_limits.advice(error)
            if not advice:
                raise
            with plainly():
                raise OSError(f"{getattr(error, 'strerror', None) or error}: {advice}") from error

    return call


class LaunchError(RuntimeError):
    """A launch did not deliver every rank's result.

    The first line says which rank failed and how; then that rank's traceback, down to the reader's own line; then how many ranks
    failed only because of it.

    Attributes: `rank` (int or None), `message` (the text without the traceback's colour), `results` (one a rank, None where
    missing), `output` (one text a rank), `script` (Path), `kind` ("exception", "signal", "exit", "timeout", "stopped", "start").
    """

    kind = "exception"

    def __init__(self, message: str, *, rank: int | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.message, self.rank, self.kind = message, rank, kind or type(self).kind
        self.results: list[Any] = []
        self.output: list[str] = []
        self.script: Path | None = None

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of the launcher's own frames, which are not where the error is."""
        return [f"{type(self).__name__}: {self.message}"]


class LaunchTimeout(LaunchError):
    """The ranks did not finish within `timeout` seconds."""

    kind = "timeout"


class LaunchStopped(LaunchError):
    """The `stop` event was set while the ranks ran."""

    kind = "stopped"


def killed_by(code: int) -> str:
    """The signal of a negative exit code in words, with the usual cause where there is one."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    often = {"SIGKILL": "out of memory", "SIGBUS": "/dev/shm is full"}
    return f"{name} (often: {often[name]})" if name in often else name
