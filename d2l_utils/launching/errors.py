"""What a launch that did not end well raises, and how it finds the first real error among its echoes."""

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d2l_utils.launching import stuck
from d2l_utils.launching.ranks import RankState
from d2l_utils.launching.stuck import rank_names


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """What is wrong with a call is told in its words alone: IPython leaves out the launcher's own frames, as for LaunchError."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        words = [f"{type(error).__name__}: {error}"]
        error.__dict__["_render_traceback_"] = lambda: words
        raise


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


@dataclass
class Ending:
    """How a launch ended, as far as it is known from outside the ranks."""

    states: list[RankState]
    agent_logs: list[str]
    timed_out: float | None = None
    stopped: bool = False
    supervisor_died: bool = False
    folder_gone: bool = False
    statuses: list[int | None] = field(
        default_factory=list
    )  # exit statuses of torchrun's agents, where they ended by themselves
    early: set[int] = field(default_factory=set)  # ranks seen gone without a word while others still ran


_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


def exit_codes(agent_logs: list[str], states: list[RankState]) -> dict[int, int]:
    """Exit codes by rank of the processes that torchrun saw fail first (negative: the signal that killed it)."""
    by_pid = {state.pid: state.rank for state in states if state.pid}
    found: dict[int, int] = {}
    for log in agent_logs:
        for code, _, pid in _FAILED.findall(log):
            if int(pid) in by_pid:
                found.setdefault(by_pid[int(pid)], int(code))
    return found


def killed_by(code: int) -> str:
    """The signal of a negative exit code in words, with the usual cause where there is one."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (often: out of memory)" if name == "SIGKILL" else name


def diagnose(ending: Ending) -> LaunchError | None:
    """The error that tells what happened, or None when every rank delivered its result."""
    states = ending.states
    missing = [s for s in states if not s.delivered]
    if not missing:
        return None
    if ending.stopped:
        return LaunchStopped(f"stopped; {_count(len(missing), 'rank')} had not finished")
    causes = [(s.error["time"], s.rank) for s in states if s.error and not s.error["echo"]]
    first = states[min(causes)[1]] if causes else None
    if first is not None and first.error:  # of ranks that failed alike, the lowest: which was faster means nothing
        summary = first.error["summary"]
        first = next(s for s in states if s.error and s.error["summary"] == summary)
    codes = exit_codes(ending.agent_logs, states)
    killed = {rank: code for rank, code in codes.items() if code < 0 and not states[rank].error}
    silent = {rank: code for rank, code in codes.items() if code > 0 and not states[rank].error and rank not in killed}
    if first is not None and first.error:
        return LaunchError(_exception_text(first.rank, first.error) + _others(states, first), rank=first.rank)
    if killed and not (ending.timed_out is not None and set(killed.values()) <= {-signal.SIGTERM}):
        rank, code = next(iter(killed.items()))
        place = f" at {states[rank].where}" if states[rank].where else ""
        text = f"rank {rank} was killed by {killed_by(code)}{place}"
        return LaunchError(text + _others(states, states[rank]), rank=rank, kind="signal")
    if silent:
        rank, code = next(iter(silent.items()))
        text = f"rank {rank} exited with status {code} and no exception"
        return LaunchError(text + _others(states, states[rank]), rank=rank, kind="exit")
    if ending.supervisor_died:
        return LaunchError("the launch's own supervisor process was killed; its ranks ended with it", kind="start")
    echoes = sorted([(s, s.error) for s in states if s.error], key=lambda pair: pair[1]["time"])
    # The first rank that met the end of another saw who was gone before torchrun ended the rest.
    early = set(echoes[0][1]["gone"]) if echoes else ending.early
    gone = [s.rank for s in states if s.exited or (s.rank in early and not s.ended)]
    agents_killed = [status for status in ending.statuses if status is not None and status < 0]
    if agents_killed:
        return LaunchError(
            f"torchrun itself was killed by {killed_by(agents_killed[0])}; its ranks ended with it", kind="start"
        )
    if len(gone) == len(missing):
        return LaunchError(f"{rank_names(gone)} exited without returning a result", rank=gone[0], kind="exit")
    if gone:
        others = _others(states, states[gone[0]], but=len(gone) - 1)
        return LaunchError(f"{rank_names(gone)} exited before the others finished{others}", rank=gone[0], kind="exit")
    delivered = [s.rank for s in states if s.delivered]
    if echoes and delivered:
        text = (
            f"{rank_names(delivered)} returned before the others finished, while {rank_names([s.rank for s in missing])} "
            "still waited in a collective: every rank must join every collective"
        )
        return LaunchError(f"{text}\n\n{echoes[0][1]['traceback']}", rank=delivered[0], kind="exit")
    if ending.timed_out is not None:
        return _timeout(states, ending.timed_out)
    if echoes:
        state, error = echoes[0]
        return LaunchError(_exception_text(state.rank, error) + _others(states, state), rank=state.rank)
    if ending.folder_gone:
        return LaunchError("the launch's temporary folder was removed while it ran", kind="start")
    log = "\n".join(log.strip() for log in ending.agent_logs if log.strip())
    return LaunchError(
        "torchrun ended before any rank had started\n\n" + (log[-3000:] or "(it printed nothing)"),
        kind="start",
    )


def _exception_text(rank: int, error: dict[str, Any]) -> str:
    """An exception may carry a whole tensor as text: the ends of it are enough."""
    return f"rank {rank} failed: {_ends(error['summary'], 2_000)}\n\n{_ends(error['traceback'], 20_000)}"


def _ends(text: str, most: int) -> str:
    """A text of more than `most` characters, without its middle."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]} ... {left_out} characters ... {text[-most // 2 :]}"


def _timeout(states: list[RankState], seconds: float) -> LaunchTimeout:
    unfinished = [s.rank for s in states if not s.delivered]
    why = stuck.explain(states)
    lines = [f"timed out after {seconds:g} s: {rank_names(unfinished)} had not finished{'; ' * bool(why.text)}{why.text}"]
    for state in states:
        if state.delivered:
            lines.append(f"  rank {state.rank} had returned")
        elif state.where or not state.pid:
            lines.append(f"  rank {state.rank} {f'was at {state.where}' if state.where else 'had not started'}")
    lines.append("The limit is the argument `timeout`, in seconds.")
    return LaunchTimeout("\n".join(lines), rank=why.rank)


def _others(states: list[RankState], culprit: RankState, but: int = 0) -> str:
    count = sum(not s.delivered and s.rank != culprit.rank for s in states) - but
    alike = sum(
        bool(culprit.error and s.error and s.rank != culprit.rank and s.error["summary"] == culprit.error["summary"])
        for s in states
    )
    text = ""
    if alike:
        text += f"\n\n{_count(alike, 'other rank')} failed in the same way."
    if count - alike > 0:
        text += f"\n\n{_count(count - alike, 'other rank')} failed only because of it."
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
