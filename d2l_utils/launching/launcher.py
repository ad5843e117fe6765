"""launch(): run a function on N real ranks through torchrun, and bring back results or the real error."""

import contextlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from d2l_utils.device import Choice, check_world_size, choose, keep_one_device
from d2l_utils.garbage import collected_later
from d2l_utils.launching import (
    diagnosis,
    environment,
    errors,
    folders,
    helper,
    host_limits,
    limits,
    output,
    ranks,
    recipes,
    source,
    turns,
)
from d2l_utils.launching.commands import agent_arguments, command_for
from d2l_utils.launching.follow import follow
from d2l_utils.launching.literals import python_value

_said: set[str] = set()


@dataclass(eq=False)
class Run:
    """A launch that ended well.

    results: what each rank returned, in rank order. script: the file that ran, kept as long as this object lives (`save` copies
    it). command: the torchrun line, fit to paste into a terminal. output: each rank's own text. seconds: from the call to the last
    result. late_failures: how ranks ended that failed only after they had delivered, by rank; empty as a rule. `recipe` and `slurm`:
    how to run the same script on several machines.
    """

    results: list[Any]
    script: Path
    command: str
    world_size: int
    nodes: int
    device: str
    backend: str
    way: str
    seconds: float
    folder: Path = field(repr=False)
    late_failures: dict[int, str] = field(default_factory=dict)
    script_arguments: list[str] = field(default_factory=list, repr=False)

    @cached_property
    def output(self) -> list[str]:
        return output.texts(self.folder, self.world_size)

    @property
    def logs(self) -> list[Path]:
        """The files with each rank's whole output."""
        return [ranks.path(self.folder, rank, "log") for rank in range(self.world_size)]

    def save(self, target: str | Path) -> Path:
        """Copy the script to `target`, a file or folder, to keep it or to take it to a cluster."""
        target = Path(target) / self.script.name if Path(target).is_dir() else Path(target)
        target.write_bytes(self.script.read_bytes())
        return target

    def recipe(self, nodes: int = 2, ranks_per_node: int | None = None, *, address: str = "ADDRESS") -> str:
        """What to type in a terminal on each of several machines. ranks_per_node: else this run's ranks, shared out.

        address: the first machine's name or number as the others reach it. ValueError names what cannot be used.
        """
        return recipes.recipe_for(self._name(), nodes, self._ranks_per_node(nodes, ranks_per_node), address)

    def slurm(
        self,
        nodes: int = 2,
        ranks_per_node: int | None = None,
        *,
        gpus: bool = True,
        cores_per_rank: int = 4,
        time: str = "1:00:00",
        setup: str = "",
    ) -> str:
        """A batch file for Slurm's `sbatch`, to be run beside the saved script. ranks_per_node: else this run's ranks, shared out.

        gpus: one for each rank. time: the job's limit in Slurm's form. setup: lines of shell that activate the environment with
        this package. ValueError names what cannot be used.
        """
        share = self._ranks_per_node(nodes, ranks_per_node)
        return recipes.slurm_for(self._name(), nodes, share, gpus, cores_per_rank, time, setup)

    def _name(self) -> list[str]:
        return [self.script.name, *self.script_arguments]

    def _ranks_per_node(self, nodes: int, given: int | None) -> int:
        return recipes.share(self.world_size, nodes) if given is None else given


@turns.counted
@errors.with_advice
def launch(
    function: Callable[..., Any] | str | os.PathLike[str],
    /,
    *,
    world_size: int | None = None,
    nodes: int = 1,
    device: str | None = None,
    restarts: int = 0,
    timeout: float = 120.0,
    uses: Iterable[Any] = (),
    output: str = "live",
    stop: threading.Event | None = None,
    **arguments: Any,
) -> Run:
    """Run `function(**arguments)` on every rank of a real torchrun launch and wait for the results.

    function: a function of an installed module, a function defined in a notebook cell (with the notebook's helpers that it names
    in `uses`), or the path of a script (arguments then become `--name=value`). It may return numbers, strings, lists, dicts,
    tensors, numpy arrays. None of its parameters may have the name of a keyword of launch. The process group exists when it is
    called, unless it calls `init_process_group` itself.
    world_size: number of ranks, 1 to 64; else D2L_WORLD_SIZE, else what the machine has. nodes: simulated nodes on this host.
    device: "cpu", or an accelerator's type that must serve, such as "cuda"; else D2L_DEVICE, else an accelerator where there is one
    for each rank.
    restarts: how often torchrun may start all ranks anew when one fails (TORCHELASTIC_RESTART_COUNT tells a rank which life it is in);
    results are those of the last life.
    timeout: seconds from when the first rank runs the function. output: "live", "ordered" (rank by rank at the end) or "quiet".
    stop: an event that ends the launch from another thread.

    Raises ValueError or TypeError before any process starts; LaunchError (LaunchTimeout, LaunchStopped) when ranks fail.
    """
    begun = time.perf_counter()
    with errors.plainly():
        source.check_keywords(function, inspect.unwrap(launch).__kwdefaults__ or {})
        size = check_world_size(world_size)
        nodes, restarts = python_value(nodes), python_value(restarts)
        _check(size, nodes, restarts, timeout, output, stop)
        host_limits.require_loopback()
        why_cold = environment.why_not_warm(os.environ)
        name, text = _script_text(function, uses, arguments, size, nodes, restarts)
        if why_cold is None:
            helper.warm_helper()  # it imports torch while this process looks for devices
        choice = choose(size, nodes, device)
    quiet = output == "quiet"
    _say_once(str(choice), f"{choice.device_type}/{choice.backend}", quiet=quiet and not choice.falls_back)
    extra = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()] if text is None else []

    def attempt(why_cold: str | None) -> _Attempt:
        with _folder_of_a_launch() as (folder, lines):
            script = folder / name if text is not None else Path(name)
            if text is not None:
                Path(source.encodable(script)).write_text(text, encoding="utf-8", errors="surrogateescape")
            line, way = _start(folder, [str(script), *extra], size, nodes, restarts, choice, why_cold, quiet)
            lines.append(line)
            ending = follow(line, folder, size, float(timeout), output, stop, restarts)
            with collected_later():
                results, unreadable = _results(folder, size)
            return _Attempt(folder, script, way, ending, results, diagnosis.diagnose(ending) or unreadable)

    made = attempt(why_cold)
    if made.way == "warm" and (why_cold := environment.why_no_fork(made.folder)):
        folders.remove(made.folder)
        made = attempt(why_cold)
    if (problem := made.problem) is not None:
        weakref.finalize(problem, folders.remove, made.folder)
        problem.results, problem.output, problem.script = made.results, _texts(made.folder, size), made.script
        if made.ending.full_disk:  # the next launch needs the room, and this one's script is all that would be lost
            folders.remove(made.folder)
        raise problem
    late = diagnosis.exit_codes(made.ending.agent_logs, made.ending.states)
    run = Run(
        results=made.results,
        script=made.script,
        command=command_for([str(made.script), *extra], size, nodes, sys.executable, restarts),
        world_size=size,
        nodes=nodes,
        device=choice.device_type,
        backend=choice.backend,
        way=made.way,
        seconds=time.perf_counter() - begun,
        folder=made.folder,
        late_failures={rank: _ended(code) for rank, code in late.items()},
        script_arguments=extra,
    )
    weakref.finalize(run, folders.remove, made.folder)
    return run


@dataclass(frozen=True)
class _Attempt:
    """A launch that was started in one of the two ways, how it ended, and what it brought."""

    folder: Path
    script: Path
    way: str
    ending: diagnosis.Ending
    results: list[Any]
    problem: errors.LaunchError | None


@contextlib.contextmanager
def _folder_of_a_launch() -> Iterator[tuple[Path, list[helper.Line]]]:
    """A fresh folder, and a list for the line of what is started in it. An exception ends that, and removes the folder."""
    folder, lines = folders.new(), list[helper.Line]()
    try:
        yield folder, lines
    except BaseException:
        for line in lines:  # the stop button in a moment when `follow` does not listen for it
            line.send("stop")
            line.close()
        folders.remove(folder)
        raise


def _results(folder: Path, size: int) -> tuple[list[Any], errors.LaunchError | None]:
    """What the ranks delivered, and an error for the first that this process cannot read."""
    found, problem = [], None
    for rank in range(size):
        try:
            found.append(ranks.result(folder, rank))
        except Exception as error:
            found.append(None)
            problem = problem or errors.LaunchError(
                f"rank {rank} returned something that the notebook cannot read: {type(error).__name__}: {error}",
                rank=rank,
            )
    return found, problem


def warm_up(world_size: int | None = None, *, largest: int = 0) -> Choice:
    """Start the helper without waiting for it, and say on what the ranks will run. Lessons call it in their first cell.

    largest: ranks of the lesson's largest launch. With fewer accelerators than that all its launches run on the CPU, so that
    it never compares one kind of device with another; 0 decides for each launch by itself.
    """
    keep_one_device(largest)
    size = check_world_size(world_size)
    if largest:  # D2L_WORLD_SIZE may ask for more ranks than the lesson itself does
        keep_one_device(max(largest, size))
    if environment.why_not_warm(os.environ) is None:
        helper.warm_helper()
    choice = choose(size)
    _said.add(f"{choice.device_type}/{choice.backend}")
    print(choice)
    return choice


def _check(size: int, nodes: Any, restarts: Any, timeout: Any, output: Any, stop: Any) -> None:
    if type(nodes) is not int or nodes < 1 or size % nodes:
        raise ValueError(f"nodes is {nodes!r}: allowed is a whole number from 1 that divides world_size, here {size}")
    if type(restarts) is not int or not 0 <= restarts <= 10:
        raise ValueError(f"restarts is {restarts!r}: allowed is a whole number from 0 to 10")
    if restarts and nodes > 1:
        raise ValueError(
            f"restarts is {restarts}: with nodes={nodes} allowed is 0, since simulated nodes restart one by one"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not (0 < float(timeout) < math.inf):
        raise ValueError(f"timeout is {timeout!r}: allowed is a number of seconds above 0")
    if output not in ("live", "ordered", "quiet"):
        raise ValueError(f"output is {output!r}: allowed are 'live', 'ordered' and 'quiet'")
    if stop is not None and not hasattr(stop, "is_set"):
        raise TypeError(f"stop is a {type(stop).__name__}: allowed is a threading.Event")
    if not threading.main_thread().is_alive():
        raise RuntimeError("Python is ending (an atexit function?): no ranks can be started any more")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError("the working directory was removed: change to a folder that exists") from error


def _script_text(
    function: Any, uses: Any, arguments: dict[str, Any], size: int, nodes: int, restarts: int
) -> tuple[str, str | None]:
    """The script's file name and text; for a script of the reader's own its path and None."""
    if isinstance(function, str | os.PathLike):
        path = Path(source.encodable(function)).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"function is {str(function)!r}: no such script")
        if path.suffix == ".ipynb":
            raise TypeError(
                f"function is {str(function)!r}, a notebook: launch takes a script. Pass a function of the notebook, or "
                "make a script of it with `jupyter nbconvert --to script`"
            )
        for key, value in arguments.items():
            if type(python_value(value)) not in (str, int, float, bool):
                raise TypeError(f"argument {key!r} is a {type(value).__name__}: a script takes strings and numbers")
        return os.fsencode(path).decode("utf-8", "surrogateescape"), None
    source.check_callable(function)
    # Beside a script called random.py nothing could import random.
    taken = function.__name__ in sys.stdlib_module_names or importlib.util.find_spec(function.__name__) is not None
    name = f"{'run_' if taken else ''}{function.__name__}.py"
    return name, source.script_for(function, uses, arguments, command_for([name], size, nodes, "python", restarts))


def _start(
    folder: Path,
    script: list[str],
    size: int,
    nodes: int,
    restarts: int,
    choice: Choice,
    why_cold: str | None,
    quiet: bool,
) -> tuple[helper.Line, str]:
    env = environment.for_ranks(os.environ, size, str(folder), choice.device_type, sys.path)
    request = folder / "request.json"

    def write(warm: bool) -> None:
        agents = agent_arguments(script, str(folder), size, nodes, warm, restarts)
        content = {
            "folder": str(folder),
            "cwd": os.getcwd(),
            "env": env,
            "path": env["PYTHONPATH"].split(os.pathsep),
            "limits": limits.of_this_process() if warm else {},
            "agents": agents,
            "lives": restarts + 1,
        }
        request.write_text(json.dumps(content), encoding="utf-8")

    if why_cold is None:
        write(warm=True)
        if helper.asleep() and not quiet:
            print(
                "No launch has used the helper process for some time, and it gave back its memory: it starts again now."
            )
        try:
            return helper.start_warm(request), "warm"
        except helper.Unavailable as error:
            why_cold = str(error)
    _say_once(f"Each launch starts Python anew, which takes seconds: {why_cold}.", f"cold: {why_cold}", quiet=False)
    write(warm=False)
    return helper.start_cold(request, env), "cold"


def _ended(code: int) -> str:
    return errors.killed_by(code) if code < 0 else f"exit status {code}"


def _texts(folder: Path, size: int) -> list[str]:
    return output.texts(folder, size)


def _say_once(text: str, key: str, quiet: bool) -> None:
    if key not in _said and not quiet:
        _said.add(key)
        print(text)
