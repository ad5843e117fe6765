"""From one machine to several: what to type in two terminals, and a batch file for Slurm, both for the script of a run.

Both name the first machine by its address and number the nodes themselves (`--node-rank`). torchrun can also find out by itself who
is first (`--rdzv-backend=c10d`), but only where every machine can look up its own name.
"""

import re
import shlex

_PORT = 29400
_WALL_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


def share(world_size: int, nodes: int) -> int:
    """Ranks of each of `nodes` when `world_size` are shared out. ValueError when they cannot be shared out evenly."""
    _whole("nodes", nodes)
    if world_size % nodes:
        raise ValueError(
            f"nodes is {nodes}, which does not divide this run's {world_size} ranks: give ranks_per_node too"
        )
    return world_size // nodes


def recipe_for(script: list[str], nodes: int, ranks_per_node: int, address: str) -> str:
    """Numbered steps and one torchrun line a node. script: its file name and arguments. ValueError as for `slurm_for`."""
    _whole("nodes", nodes)
    _whole("ranks_per_node", ranks_per_node)
    if not isinstance(address, str) or not re.fullmatch(r"[\w.:-]+", address):
        raise ValueError(f"address is {address!r}: allowed is the name or number of one machine")
    given = address != "ADDRESS"
    lines = [
        f"{_count(nodes, 'machine')} with {_count(ranks_per_node, 'rank')} each: world size {nodes * ranks_per_node}.",
        "",
        "1. On every machine, install this package into an environment of the same Python, and activate it.",
        f'2. Keep the script with run.save("{script[0]}"), and copy it to every machine.',
        f"3. In a terminal on each machine, beside the script, within some minutes of each other. Port {_PORT} must be free",
        "   on machine 0, and the ranks choose ports of their own: no firewall between the machines.",
        *([] if given else ["   ADDRESS is that of machine 0 as the others reach it: `hostname -I` prints it there."]),
        "",
    ]
    for node in range(nodes):
        command = _torchrun(script, str(nodes), ranks_per_node, str(node), address, str(_PORT))
        lines += [f"   machine {node}{', which is ' + address if node == 0 else ''}:", "", f"       {command}", ""]
    return "\n".join(lines).rstrip() + "\n"


def slurm_for(
    script: list[str], nodes: int, ranks_per_node: int, gpus: bool, cores_per_rank: int, time: str, setup: str
) -> str:
    """A batch file for `sbatch`, run from the folder that holds the script.

    script: its file name and arguments. gpus: whether each rank asks for one. time: Slurm's wall time, such as "1:00:00". setup:
    shell lines that make `torchrun` and this package available on every node. ValueError names what cannot be used.
    """
    _whole("nodes", nodes)
    _whole("ranks_per_node", ranks_per_node)
    _whole("cores_per_rank", cores_per_rank)
    if not isinstance(time, str) or not _WALL_TIME.fullmatch(time):
        raise ValueError(f"time is {time!r}: allowed is Slurm's form, such as '30', '1:00:00' or '2-00:00:00'")
    if not isinstance(gpus, bool):
        raise TypeError(f"gpus is {gpus!r}: allowed is True, one for each rank, or False")
    if not isinstance(setup, str):
        raise TypeError(f"setup is a {type(setup).__name__}: allowed are lines of shell")
    cores = ranks_per_node * cores_per_rank  # said to srun too: a newer one does not take it over from the job
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', script[0].removesuffix('.py'))}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={ranks_per_node}"] if gpus else []),
        f"#SBATCH --cpus-per-task={cores}",
        f"#SBATCH --time={time}",
        "#SBATCH --output=%x-%j.log",
    ]
    # Each node's own number is known only inside srun, hence the inner shell.
    command = _torchrun(
        script, '"$SLURM_JOB_NUM_NODES"', ranks_per_node, '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"'
    )
    body = [
        *([setup.strip(), ""] if setup.strip() else []),
        "set -euo pipefail  # only now: what activates an environment is seldom written for it",
        "",
        "# The ranks meet on the job's first node, on a port that other jobs there do not have.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "MASTER_ADDR=${hosts[0]}",
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        f"export OMP_NUM_THREADS={cores_per_rank}",
        "",
        "# One task a node, which is torchrun; it starts the ranks. A node that fails ends the job.",
        f"srun --kill-on-bad-exit=1 --cpus-per-task={cores} bash -c {shlex.quote(command)}",
    ]
    return "\n".join([*head, "", *body]) + "\n"


def _torchrun(script: list[str], nodes: str, ranks: int, node: str, address: str, port: str) -> str:
    options = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        f"--node-rank={node}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]
    return " ".join(["torchrun", *options, shlex.join(script)])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}: allowed is a whole number from 1")
