"""What the ranks of test_checkpoint run: many trainings in one launch, since a launch costs more than one of them."""

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from chapter19_9.resuming.checkpoint import Checkpoints
from chapter19_9.train import train
from d2l_utils.launching import worker


def train_all(runs, folder, every=0, **settings):
    """{run: result}. runs: {name: (strategy, of whose checkpoints, further settings)}."""
    return {
        name: train(
            strategy, checkpoints=Checkpoints(f"{folder}/{saved_by}", every, not weights_only), **settings | more
        )
        for name, (strategy, saved_by, weights_only, more) in runs.items()
    }


def dies(how, lives=1, culprit=1):
    """Rank ``culprit`` fails in the first so many ``lives``; the others wait for it. Returns the life, from 0.

    how: "kill", "raise", "late" (after all have delivered), "early" (after another has delivered, in the first life).
    """
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"life {life}", flush=True)
    if dist.get_rank() == culprit and life < lives:
        if how == "late":
            worker._wait_for_others = abort_when_all_have_delivered
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            while how == "early" and life == 0 and not delivered():
                time.sleep(0.01)
            raise ValueError(f"in life {life}")
    elif how == "early" and life == 0:
        return life
    dist.barrier()
    return life


def delivered():
    """How many ranks have delivered."""
    return len(list(Path(os.environ["D2L_RUN_FOLDER"]).glob("*.result")))


def abort_when_all_have_delivered(folder, size):
    while delivered() < size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGABRT)
