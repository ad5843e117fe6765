"""What the ranks run in test_throttle.py."""

import time

import torch
import torch.distributed as dist

from chapter19_9.strategies import STRATEGIES
from chapter19_9.strategies.ring import reduce_scatter
from chapter19_9.train import train
from d2l_utils.throttle import Throttle


def by_itself(link):
    """(transfers, values, when the asker was free again) of two asynchronous collectives and a ring."""
    rank = dist.get_rank()
    x, y, whole = torch.full((1000,), rank + 1.0), torch.full((500,), rank + 1.0), torch.arange(8.0)
    part = torch.empty(4)
    slow = Throttle(link)
    with slow:
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, src=1, async_op=True)]
        free, untouched = time.time(), x[0].item()
        done = [work.is_completed() for work in works]
        for work in works:
            work.wait()
        reduce_scatter(part, whole, "ring")
    outside = len(slow.transfers)
    dist.all_reduce(torch.ones(1))
    return {
        "transfers": [vars(t) for t in slow.transfers], "charged": slow.charged, "free": free, "untouched": untouched,
        "done": done, "values": [x[0].item(), y[0].item(), part.tolist()], "outside": len(slow.transfers) - outside,
    }  # fmt: skip


def trained(config, link, **settings):
    """Every strategy with the link and without: [(slowed, free)] by name."""
    return {
        name: [train(name, config, link=one, record_step=settings["steps"] - 1, **settings) for one in (link, None)]
        for name in STRATEGIES
    }


def mistaken(link):
    """What the backend refuses reaches who waits; afterwards all is as before."""
    before = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "send")}
    said = []
    with Throttle(link):
        for _ in range(2):
            try:
                dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
            except Exception as error:
                said.append(str(error))
        x = torch.ones(1)
        dist.all_reduce(x)
        try:
            with Throttle(link):
                pass
        except RuntimeError as error:
            said.append(str(error))
    return said, x.item(), all(vars(dist.ProcessGroup)[name] is method for name, method in before.items())


def failing(link):
    """Rank 1 fails while a collective is still on its link, for longer than the launch may take."""
    slow = Throttle(link)
    try:
        with slow:
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            if dist.get_rank() == 1:
                raise ValueError("mine")
            work.wait()
    except ValueError as error:
        try:
            with slow:
                pass
        except RuntimeError as again:
            raise error from again
