"""What the ranks of test_checkpoint run: many trainings in one launch, since a launch costs more than one of them."""

import os
import signal
import threading
import time

import torch.distributed as dist

from chapter19_9.resuming.checkpoint import Checkpoints
from chapter19_9.train import train


def train_all(runs, folder, every=0, **settings):
    """{run: result}. runs: {name: (strategy, of whose checkpoints, further settings)}."""
    return {
        name: train(
            strategy, checkpoints=Checkpoints(f"{folder}/{saved_by}", every, not weights_only), **settings | more
        )
        for name, (strategy, saved_by, weights_only, more) in runs.items()
    }


def dies(how, lives=1, culprit=1):
    """Rank ``culprit`` fails in the first so many ``lives``; the others wait for it. Returns the life, from 0."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"life {life}", flush=True)
    if dist.get_rank() == culprit and life < lives:
        if how == "late":  # after it has delivered
            threading.Thread(target=die_when_all_have_delivered, daemon=True).start()
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "leave":
            os._exit(0)
        else:
            raise ValueError(f"in life {life}")
    dist.barrier()
    return life


def die_when_all_have_delivered():
    folder = os.environ["D2L_RUN_FOLDER"]
    while sum(name.endswith(".result") for name in os.listdir(folder)) < dist.get_world_size():
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGABRT)
