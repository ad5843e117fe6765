"""Five collectives on small numbers, and what each rank held before and after."""

from typing import Any

NAMES = ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")

FINDINGS = {
    "broadcast": "broadcast: rank 0's data goes to every rank",
    "reduce": "reduce: rank 0 gets the sum; the other ranks get nothing",
    "all_reduce": "all_reduce: every rank gets the sum",
    "all_gather": "all_gather: every rank gets every rank's data",
    "reduce_scatter": "reduce_scatter: each rank gets one part of the sum",
}


def exchange(collective: str) -> dict[str, Any]:
    """What every rank runs: the collective on small numbers, chunk c of rank r being 10 (r + 1) + c.

    Returns {"before": [...], "after": [...]} of whole numbers; "after" is None where nothing is promised.
    Raises ValueError for a collective that is not in NAMES.
    """
    import torch
    import torch.distributed as dist

    from d2l_utils.device import rank_device

    check(collective)
    rank, world = dist.get_rank(), dist.get_world_size()
    count = 1 if collective == "all_gather" else world
    mine = 10 * (rank + 1) + torch.arange(count, device=rank_device())
    before, after = mine.tolist(), mine
    if collective == "broadcast":
        dist.broadcast(mine, src=0)
    elif collective == "reduce":
        dist.reduce(mine, dst=0)
    elif collective == "all_reduce":
        dist.all_reduce(mine)
    elif collective == "all_gather":
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        after = torch.cat(parts)
    else:
        after = mine.new_empty(1)
        dist.reduce_scatter(after, list(mine.split(1)))
    # On the ranks that are not its target, reduce leaves whatever its algorithm needed on the way.
    undefined = collective == "reduce" and rank != 0
    return {"before": before, "after": None if undefined else after.tolist()}


def check(collective: str) -> None:
    """Raise ValueError for a name that is not in NAMES."""
    if collective not in NAMES:
        raise ValueError(f"collective is {collective!r}; allowed: {', '.join(NAMES)}")
