"""H6: of ranks that wait for each other until the time is up, the right one is named, by the collective in which each is."""

import os
import re
import threading

import pytest

from d2l_utils import LaunchTimeout, launch

DIFFER = "every rank must call the same collectives in the same order"


def stuck(how):
    """Rank 1 leaves the others alone in this way."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, x = dist.get_rank(), torch.ones(2)
    if how.startswith("ddp"):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(2):
            try:
                loss = model(torch.ones(2, 4)).sum()
                if (rank, step) == (1, 1):
                    raise ValueError("this one is swallowed")
                loss.backward()
            except ValueError:
                if how == "ddp, sleep":
                    time.sleep(100)
                dist.barrier()
    elif how == "zero3":
        from chapter19_9.train import train
        from d2l_utils.transformer import TransformerConfig

        if rank == 1:
            torch.optim.AdamW.step = lambda *_, **__: time.sleep(100)
        train("zero3", TransformerConfig(layers=2, width=16, heads=2, length=8), steps=2, batch=12)
    elif how == "ring":
        from chapter19_9.strategies import ring

        if rank == 1:
            time.sleep(100)
        ring._exchange([(x, 1)], [(x, 1)])
    elif how == "receive":
        if rank != 1:
            dist.recv(x, 1)
        time.sleep(100)
    elif how == "groups":
        groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
        if rank == 1:
            time.sleep(100)
        dist.all_reduce(x, group=groups[rank // 2])
    elif how == "barrier":
        dist.barrier() if rank == 1 else dist.all_reduce(x)
    elif how == "async":
        if rank == 1:
            time.sleep(100)
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        works[1].wait()


def waited(how, world_size=3, timeout=3):
    with pytest.raises(LaunchTimeout) as caught:
        launch(stuck, world_size=world_size, how=how, timeout=timeout, output="quiet")
    return caught.value, caught.value.message.splitlines()[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("ddp, sleep", r"rank 1 never joined the all_reduce \(collective \d+\) in which ranks 0 and 2 waited"),
        ("ddp, barrier", f"rank 1 waited in barrier while ranks 0 and 2 waited in all_reduce: {DIFFER}"),
        ("zero3", r"rank 1 never joined the \w+ \(collective \d+\) in which ranks 0 and 2 waited"),
        ("ring", "rank 1 never joined the send or recv in which ranks 0 and 2 waited"),
        ("receive", "rank 1 never joined the recv in which ranks 0 and 2 waited"),
        ("async", r"rank 1 never joined the all_reduce \(collective 1\) in which ranks 0 and 2 waited"),
        ("groups", r"rank 1 never joined the all_reduce \(collective 1\) in which rank 0 waited"),
    ],
)
def test_the_rank_that_left_the_others_alone_is_named(how, words):
    error, first = waited(how, timeout=8 if how == "zero3" else 3)
    assert re.search(rf"had not finished; {words}$", first), error.message
    assert error.rank == 1


def test_of_two_ranks_that_disagree_both_collectives_are_told(way):
    error, first = waited("barrier", world_size=2)
    assert f"rank 0 waited in all_reduce while rank 1 waited in barrier: {DIFFER}" in first and error.rank is None


def forks():
    """Who answers for the collectives is a thread: it sleeps, and a child that is forked does not have it."""
    import torch.distributed as dist

    dist.barrier()
    pid = os.fork()
    if pid == 0:
        os._exit(7 if threading.active_count() == 1 else 8)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_rank_can_fork():
    assert launch(forks, world_size=2).results == [7, 7]
