"""The torchrun command lines: the plain one that a reader can paste, and the arguments that launch itself gives."""

import shlex
import subprocess
import sys
from pathlib import Path

from d2l_utils.launching import rendezvous

_MODULE = "d2l_utils.launching.worker"
_WORKER = Path(__file__).resolve().with_name("worker.py")


def command_for(script: list[str], world_size: int, nodes: int, python: str, restarts: int = 0) -> str:
    """The plain torchrun command for this script: nothing of the launcher's is in it.

    Two simulated nodes are two commands that find each other on this host; on a cluster each node runs one of them.
    """
    join = subprocess.list2cmdline if sys.platform == "win32" else shlex.join
    launcher = [python, "-m", "torch.distributed.run"]
    if nodes == 1:
        again = [f"--max-restarts={restarts}"] if restarts else []
        return join([*launcher, "--standalone", f"--nproc-per-node={world_size}", *again, *script])
    meet = [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:29400",
        "--rdzv-id=lesson",
        "--local-addr=127.0.0.1",
    ]
    one = join([*launcher, f"--nnodes={nodes}", f"--nproc-per-node={world_size // nodes}", *meet, *script])
    return " & ".join([one] * nodes) + " & wait"


def agent_arguments(
    script: list[str], folder: str, world_size: int, nodes: int, warm: bool, restarts: int = 0
) -> list[list[str]]:
    """torchrun's arguments, one list a node."""
    # Without `--` older Pythons take a script's own --n=3 for torchrun's --nnodes or --node-rank.
    end = ["--"] if len(script) > 1 else []
    worker = ["--run-path", "--start-method=fork", *end, str(_WORKER)] if warm else ["--module", *end, _MODULE]
    return [
        [
            f"--nnodes={nodes}",
            f"--nproc-per-node={world_size // nodes}",
            f"--rdzv-backend={rendezvous.NAME}",
            f"--rdzv-endpoint={folder}",
            f"--rdzv-conf=node={node},host={int(node == 0 and not warm)}",
            "--rdzv-id=launch",
            "--local-addr=127.0.0.1",
            "--monitor-interval=0.02",
            f"--max-restarts={restarts}",
            *worker,
            *script,
        ]
        for node in range(nodes)
    ]
