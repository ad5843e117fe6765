"""What the ranks of test_record run: steps of known models, recorded, beside what PyTorch itself says of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2l_utils.memory import held
from d2l_utils.record import record
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=3, width=64, heads=4, length=32)


def make(bucket_mb, **options):
    model = DistributedDataParallel(Transformer(CONFIG), bucket_cap_mb=bucket_mb, **options)
    return model, torch.optim.AdamW(model.parameters())


def one_step(model, optimizer, step=0):
    optimizer.zero_grad()
    text = sequences(CONFIG.length, 4, offset=4 * (step * dist.get_world_size() + dist.get_rank()))
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    optimizer.step()
    return loss.item()


def ddp(bucket_mb, allocations=False):
    """The third step of DDP (its buckets are final then), the bytes of its buckets and of its parameters."""
    model, optimizer = make(bucket_mb)
    for step in range(2):
        one_step(model, optimizer, step)
    with record(model, optimizer, allocations=allocations) as recording:
        one_step(model, optimizer, 2)
    log = model._get_ddp_logging_data()
    buckets = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return recording, [int(size) for size in buckets.split(",")], parameters


def first_step_memory():
    """The first step with its curve, and what it left behind: bytes of gradients and of optimizer states."""
    model, optimizer = make(1, gradient_as_bucket_view=False)
    with record(model, optimizer, allocations=True) as recording:
        one_step(model, optimizer)
    after = held(model, optimizer)
    return recording, after.gradients, after.optimizer


def later_step_memory():
    """The third step with its curve: it releases the gradients of the second and makes its own."""
    model, optimizer = make(1, gradient_as_bucket_view=False)
    for step in range(2):
        one_step(model, optimizer, step)
    with record(model, optimizer, allocations=True) as recording:
        one_step(model, optimizer, 2)
    return recording, held(model, optimizer).gradients


def same_numbers():
    """Weights after three steps, recorded and not: the largest difference; and what the recording left hanging."""
    weights, left = [], 0
    for recorded in (False, True):
        model, optimizer = make(0.1)
        for step in range(3):
            with record(model, optimizer, allocations=True, enabled=recorded):
                one_step(model, optimizer, step)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        left += sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return (weights[0] - weights[1]).abs().max().item(), left


def broken_step():
    """A step that raises in the middle of a block; then a good one. Returns what is left, and the good one's events."""
    model, optimizer = make(0.1)
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    block = model.module.blocks[1]

    def fail(*_):
        raise ZeroDivisionError("on purpose")

    hook = block.register_forward_pre_hook(fail)
    raised = None
    try:
        with record(model, optimizer) as recording:
            one_step(model, optimizer)
    except ZeroDivisionError as error:
        raised = str(error)
    hook.remove()
    restored = (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    one_step(model, optimizer)
    with record(model, optimizer) as good:
        one_step(model, optimizer)
    return raised, restored, hooks, recording.events, good.events


ELEMENTS = 600_000  # of float32 on each rank: enough for headers not to matter


def collectives():
    """Every collective once, each in a recording of its own: {what: (events of collectives, bytes on the wire)}."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part, whole = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS * size)
    parts = list(whole.chunk(size))
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def exchange():
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        for work in [dist.isend(part, ahead), dist.irecv(torch.empty_like(part), behind)]:
            work.wait()

    calls = {
        "all_reduce": lambda: dist.all_reduce(part),
        "all_gather": lambda: gather(whole, part),
        "all_gather list": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "reduce_scatter list": lambda: dist.reduce_scatter(part, parts),
        "broadcast": lambda: dist.broadcast(part, src=1),
        "reduce": lambda: dist.reduce(part, dst=1),
        "gather": lambda: dist.gather(part, parts if rank == 1 else None, dst=1),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "barrier": dist.barrier,
        "send recv": exchange,
    }
    model, seen = nn.Linear(1, 1), {}
    for what, call in calls.items():
        call()  # connections are made the first time
        dist.barrier()
        with record(model) as recording:
            call()
        seen[what] = ([event for event in recording.events if event.kind == "collective"], recording.wire_bytes)
    return seen


def in_a_subgroup():
    """An all-reduce of ranks 2 and 3 and one of all: group sizes as ranks 2 and 3 see them."""
    group = dist.new_group([2, 3])
    x, model = torch.ones(10), nn.Linear(1, 1)
    with record(model) as recording:
        dist.all_reduce(x)
        if dist.get_rank() >= 2:
            dist.all_reduce(x, group=group)
    return [(event.name, event.bytes, event.group_size) for event in recording.events if event.kind == "collective"]


def fsdp2():
    """One step of FSDP2 with each block and the root sharded, and the bytes of each unit's parameters."""
    from torch.distributed.fsdp import fully_shard

    model = Transformer(CONFIG)
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in model.blocks]
    rest = sum(parameter.nbytes for parameter in model.parameters()) - sum(blocks)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    with record(model, optimizer) as recording:
        one_step(model, optimizer, 1)
    return recording, blocks, rest
