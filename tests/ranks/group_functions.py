"""What a reader writes with CPU tensors, in the group that ranks on GPUs have. For test_group.py."""


def cpu_tensors(backend):
    """Names of what this group takes and of what it refuses, with the numbers that came out."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from chapter19_9.strategies.ring import reduce_scatter
    from d2l_utils.agree import largest_difference, ranks_agree

    dist.init_process_group(backend)
    rank, n = dist.get_rank(), dist.get_world_size()

    def summed():
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return x.tolist()

    def scattered(how):
        part = torch.empty(1)
        reduce_scatter(part, torch.arange(float(n)), how)
        return part.item()

    def trained():
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(rank))).sum().backward()
        return model.module.weight.grad.item()

    def gathered():
        found = [None] * n
        dist.all_gather_object(found, rank)
        return found

    tries = {
        "all_reduce": summed,
        "ring": lambda: scattered("ring"),
        "auto": lambda: scattered("auto"),
        "DDP": trained,
        "objects": gathered,
        "agree": lambda: ranks_agree([torch.ones(2)]),
        "nothing agrees": lambda: ranks_agree([]),
        "difference": lambda: largest_difference([torch.full((1,), float(rank))]),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            found[name] = attempt()
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found
