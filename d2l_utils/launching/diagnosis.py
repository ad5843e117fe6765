"""Why a launch did not end well: the first real error among its echoes, from what its ranks left behind."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from d2l_utils.launching import host_limits, stuck
from d2l_utils.launching.errors import LaunchError, LaunchStopped, LaunchTimeout, killed_by
from d2l_utils.launching.ranks import RankError, RankState
from d2l_utils.launching.stuck import rank_names


@dataclass
class Ending:
    """How a launch ended, as far as it is known from outside the ranks."""

    states: list[RankState]
    agent_logs: list[str]
    timed_out: float | None = None
    stopped: bool = False
    supervisor_died: bool = False
    folder_gone: bool = False
    rank_logs: list[str] = field(default_factory=list)  # the ends of what the ranks printed
    supervisor_log: str = ""
    full_disk: str = ""  # the folder of the launch, where nothing more could be written to its disk
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


def diagnose(ending: Ending) -> LaunchError | None:
    """The error that tells what happened, or None when every rank delivered its result. The surest cause is asked for first."""
    if all(state.delivered for state in ending.states):
        return None
    for step in _STEPS:
        if (problem := step(ending)) is not None:
            return problem
    return _nothing_started(ending)


def _stopped(ending: Ending) -> LaunchError | None:
    number = sum(not state.delivered for state in ending.states)
    return LaunchStopped(f"stopped; {_count(number, 'rank')} had not finished") if ending.stopped else None


def _exception(ending: Ending) -> LaunchError | None:
    """The first error that is no echo of another rank's end; of ranks that failed alike, the lowest: which was faster means nothing."""
    causes = [(s.error, s.rank) for s in ending.states if s.error and not s.error.echo]
    if not causes:
        return None
    summary = min(causes, key=lambda cause: (cause[0].time, cause[1]))[0].summary
    error, rank = next(cause for cause in causes if cause[0].summary == summary)
    return LaunchError(_exception_text(rank, error) + _others(ending.states, rank), rank=rank)


def _without_word(ending: Ending) -> dict[int, int]:
    """Exit codes of ranks that failed and left no error."""
    codes = exit_codes(ending.agent_logs, ending.states)
    return {rank: code for rank, code in codes.items() if code and not ending.states[rank].error}


def _killed(ending: Ending) -> LaunchError | None:
    killed = {rank: code for rank, code in _without_word(ending).items() if code < 0}
    if not killed or (ending.timed_out is not None and set(killed.values()) <= {-signal.SIGTERM}):
        return None
    rank, code = next(iter(killed.items()))
    where = ending.states[rank].where
    text = f"rank {rank} was killed by {killed_by(code)}{f' at {where}' if where else ''}{_last_words(ending, rank)}"
    if code == -signal.SIGABRT and (lines := "".join(ending.rank_logs[rank : rank + 1]).strip().splitlines()):
        text += f"; the last line that it printed is: {lines[-1][-500:]}"  # C++ says why it aborts
    return LaunchError(text + _others(ending.states, rank), rank=rank, kind="signal")


def _full_disk(ending: Ending) -> LaunchError | None:
    if not ending.full_disk:
        return None
    rank = next(iter(_without_word(ending)), None)
    who = "the launch" if rank is None else f"rank {rank}"
    text = f"{who} could not write its files in {ending.full_disk}: {host_limits.FULL_DISK}"
    return LaunchError(text, rank=rank, kind="start" if rank is None else "exit")


def _exit_status(ending: Ending) -> LaunchError | None:
    silent = {rank: code for rank, code in _without_word(ending).items() if code > 0}
    if not silent:
        return None
    rank, code = next(iter(silent.items()))
    text = f"rank {rank} exited with status {code} and no exception{_last_words(ending, rank)}"
    return LaunchError(text + _others(ending.states, rank), rank=rank, kind="exit")


def _last_words(ending: Ending, rank: int) -> str:
    """What to do about what the operating system refused to a rank that ended without an exception, where it printed that."""
    advice = host_limits.advice_for_log(ending.rank_logs[rank]) if ending.rank_logs else ""
    return f" ({advice})" if advice else ""


def _refused(ending: Ending) -> LaunchError | None:
    """What the operating system refused to the supervisor or to torchrun before any rank ran."""
    log = _log(ending)
    advice = "" if any(state.pid for state in ending.states) else host_limits.advice_for_log(log)
    return LaunchError(f"the ranks could not be started: {advice}\n\n{log}", kind="start") if advice else None


def _supervisor_killed(ending: Ending) -> LaunchError | None:
    if not ending.supervisor_died:
        return None
    if ending.supervisor_log:
        return LaunchError(f"the launch's own supervisor process failed\n\n{ending.supervisor_log}", kind="start")
    return LaunchError("the launch's own supervisor process was killed; its ranks ended with it", kind="start")


def _torchrun_killed(ending: Ending) -> LaunchError | None:
    killed = [status for status in ending.statuses if status is not None and status < 0]
    if not killed:
        return None
    return LaunchError(f"torchrun itself was killed by {killed_by(killed[0])}; its ranks ended with it", kind="start")


def _echoes(ending: Ending) -> list[tuple[int, RankError]]:
    """Ranks that failed only because of another, in order of time."""
    return sorted([(s.rank, s.error) for s in ending.states if s.error], key=lambda pair: pair[1].time)


def _gone(ending: Ending) -> LaunchError | None:
    """Ranks whose process ended by itself without a result or an error."""
    states, echoes = ending.states, _echoes(ending)
    # The first rank that met the end of another saw who was gone before torchrun ended the rest.
    early = set(echoes[0][1].gone) if echoes else ending.early
    gone = [s.rank for s in states if s.exited or (s.rank in early and not s.ended)]
    if not gone:
        return None
    if len(gone) == sum(not s.delivered for s in states):
        return LaunchError(f"{rank_names(gone)} exited without returning a result", rank=gone[0], kind="exit")
    others = _others(states, gone[0], but=len(gone) - 1)
    return LaunchError(f"{rank_names(gone)} exited before the others finished{others}", rank=gone[0], kind="exit")


def _returned_early(ending: Ending) -> LaunchError | None:
    delivered, echoes = [s.rank for s in ending.states if s.delivered], _echoes(ending)
    if not delivered or not echoes:
        return None
    text = (
        f"{rank_names(delivered)} returned before the others finished, while "
        f"{rank_names(s.rank for s in ending.states if not s.delivered)} "
        "still waited in a collective: every rank must join every collective"
    )
    return LaunchError(f"{text}\n\n{echoes[0][1].traceback}", rank=delivered[0], kind="exit")


def _timed_out(ending: Ending) -> LaunchError | None:
    if ending.timed_out is None:
        return None
    states = ending.states
    why = stuck.explain(states)
    unfinished = rank_names(s.rank for s in states if not s.delivered)
    lines = [f"timed out after {ending.timed_out:g} s: {unfinished} had not finished{'; ' * bool(why.text)}{why.text}"]
    for state in states:
        if state.delivered:
            lines.append(f"  rank {state.rank} had returned")
        elif state.where or not state.pid:
            lines.append(f"  rank {state.rank} {f'was at {state.where}' if state.where else 'had not started'}")
    lines.append("The limit is the argument `timeout`, in seconds.")
    return LaunchTimeout("\n".join(lines), rank=why.rank)


def _echo_alone(ending: Ending) -> LaunchError | None:
    """No cause was found: the first echo is all that is known."""
    for rank, error in _echoes(ending)[:1]:
        return LaunchError(_exception_text(rank, error) + _others(ending.states, rank), rank=rank)
    return None


def _folder_gone(ending: Ending) -> LaunchError | None:
    if not ending.folder_gone:
        return None
    return LaunchError("the launch's temporary folder was removed while it ran", kind="start")


_STEPS: tuple[Callable[[Ending], LaunchError | None], ...] = (
    _stopped,
    _exception,
    _killed,
    _full_disk,
    _exit_status,
    _refused,
    _supervisor_killed,
    _torchrun_killed,
    _gone,
    _returned_early,
    _timed_out,
    _echo_alone,
    _folder_gone,
)


def _nothing_started(ending: Ending) -> LaunchError:
    log = _log(ending) or "(it printed nothing)"
    return LaunchError(f"torchrun ended before any rank had started\n\n{log}", kind="start")


def _log(ending: Ending) -> str:
    return "\n".join(log.strip() for log in (*ending.agent_logs, ending.supervisor_log) if log.strip())[-3000:]


def _exception_text(rank: int, error: RankError) -> str:
    """An exception may carry a whole tensor as text: the ends of it are enough."""
    advice = f" ({error.advice})" if error.advice else ""
    return f"rank {rank} failed: {_ends(error.summary, 2_000)}{advice}\n\n{_ends(error.traceback, 20_000)}"


def _ends(text: str, most: int) -> str:
    """A text of more than `most` characters, without its middle."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]} ... {left_out} characters ... {text[-most // 2 :]}"


def _others(states: list[RankState], culprit: int, but: int = 0) -> str:
    """How many ranks failed as rank `culprit` did, and how many only because of it, `but` so many that are told of elsewhere."""
    count = sum(not s.delivered and s.rank != culprit for s in states) - but
    own = states[culprit].error
    alike = sum(bool(own and s.error and s.rank != culprit and s.error.summary == own.summary) for s in states)
    text = ""
    if alike:
        text += f"\n\n{_count(alike, 'other rank')} failed in the same way."
    if count - alike > 0:
        text += f"\n\n{_count(count - alike, 'other rank')} failed only because of it."
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
