"""A training that is killed at the worst moment, to see what is left of it."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from chapter19_9.result import Result
from chapter19_9.resuming.checkpoint import Checkpoints
from chapter19_9.strategies.shards import place
from chapter19_9.train import train


def killed_while_saving(step: int, checkpoints: Checkpoints, **settings: Any) -> tuple[int, list[str], Result]:
    """``train``; while the checkpoint of ``step`` is being saved, the last rank is killed by SIGKILL, once: its own file is
    written then, and no rank knows of it. Returns (the life, from 0; what lay in the folder when it began; the result).

    Runs on every rank of a torchrun launch; only ``restarts`` give it a second life.
    """
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    found = sorted(os.listdir(checkpoints.folder)) if os.path.isdir(checkpoints.folder) else []
    writers: Any = FileSystemWriter
    write = writers.write_data

    def strike(writer: Any, *arguments: Any) -> Any:
        done = write(writer, *arguments)
        if life == 0 and f"step-{step:06}" in str(writer.path) and place()[0] == place()[1] - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    writers.write_data = strike
    try:
        return life, found, train(checkpoints=checkpoints, **settings)
    finally:
        writers.write_data = write
