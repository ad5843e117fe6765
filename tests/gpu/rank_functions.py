"""What the ranks of the GPU tests run."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d2l_utils import trace
from d2l_utils.device import rank_device
from tests.gpu import raw_traces


def device_of_this_rank() -> dict[str, Any]:
    """Whether this rank can use its device, which one it is, and which one torch takes when none is named."""
    device = rank_device()
    made = torch.ones(1, device=device) + 1
    return {
        "bad fork": torch._C._cuda_isInBadFork(),
        "sum": made.item(),
        "device": str(made.device),
        "current": None if device.type == "cpu" else torch.accelerator.current_device_index(),
        "local rank": int(os.environ["LOCAL_RANK"]),
    }


def optimizer_step() -> str:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()
    return str(weight.device)


def default_mesh() -> str:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    return str(next(model.parameters()).device)


def checkpoint() -> str:
    import tempfile

    import torch.distributed.checkpoint as dcp

    # Every rank needs the same folder; rank 0 makes it.
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weight = torch.ones(4)
    dcp.save({"weight": weight}, checkpoint_id=folder[0])
    return str(weight.device)


def on_the_cpu(what: str) -> dict[str, Any]:
    """One of the three above, in a rank on the CPU, and whether an accelerator was touched by it."""
    used = {"AdamW": optimizer_step, "fully_shard": default_mesh, "dcp.save": checkpoint}[what]()
    return {
        "tensors on": used,
        "available": torch.cuda.is_available(),
        "initialized": torch.cuda.is_initialized(),
        "backend": dist.get_backend(),
    }


def cpu_tensors() -> dict[str, Any]:
    """What a reader writes with tensors on the CPU, in the default group of a rank on a device."""
    size = dist.get_world_size()
    total = torch.ones(1)
    dist.all_reduce(total)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, dist.get_rank())
    on_device = torch.ones(1, device=rank_device())
    dist.all_reduce(on_device)
    return {
        "CPU": total.item(),
        "DDP": model.module.weight.grad is not None,
        "objects": found,
        "device": on_device.item(),
    }


def traced(strategy: str, **settings: Any) -> dict[str, Any]:
    """`train` with one step recorded: its result, and the profiler's own rows of that step."""
    from chapter19_9.train import train

    seen: list[list[raw_traces.Row]] = []
    plain = trace.Trace.__init__

    def keeping(self: Any, raw: Any, *args: Any, **kwargs: Any) -> None:
        raw = list(raw)
        seen.append(raw_traces.rows(raw))
        plain(self, raw, *args, **kwargs)

    trace.Trace.__init__ = keeping  # type: ignore[method-assign]
    try:
        result = train(strategy, **settings)
    finally:
        trace.Trace.__init__ = plain  # type: ignore[method-assign]
    return {"result": result, "rows": seen[-1] if seen else [], "title": f"{torch.__version__}, {_device_name()}"}


def _device_name() -> str:
    device = rank_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def recorded_after_a_model_without_weights() -> int:
    """The kernels that the second recording of a rank sees, after one in which nothing said that a device is used."""
    from d2l_utils.record import record

    device, found = rank_device(), []
    plain = trace.Trace.__init__

    def keeping(self: Any, raw: Any, *args: Any, **kwargs: Any) -> None:
        raw = list(raw)
        found.append(len(raw_traces.kernels(raw_traces.rows(raw))))
        plain(self, raw, *args, **kwargs)

    trace.Trace.__init__ = keeping  # type: ignore[method-assign]
    try:
        with record(nn.Identity()):
            torch.ones(4, 4) @ torch.ones(4, 4)
        model = nn.Linear(64, 64).to(device)
        with record(model):
            model(torch.ones(64, 64, device=device)).sum().backward()
    finally:
        trace.Trace.__init__ = plain  # type: ignore[method-assign]
    return found[-1]


def scattered(how: str, count: int = 1 << 12) -> float:
    """The largest difference between reduce-scatter by hand and the backend's, on device tensors."""
    from chapter19_9.strategies.ring import reduce_scatter

    size, device = dist.get_world_size(), rank_device()
    whole = torch.randn(size * count, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    by_hand, backend = (torch.empty(count, device=device) for _ in range(2))
    for _ in range(3):
        reduce_scatter(by_hand, whole, how)
        reduce_scatter(backend, whole, "backend")
    return (by_hand - backend).abs().max().item()


def ending(how: str, seconds: float = 120.0) -> None:
    """All ranks but rank 1 wait for it in an all-reduce of device tensors."""
    total = torch.ones(1, device=rank_device())
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "return":
            return
        time.sleep(seconds)
    dist.all_reduce(total)
    total.item()


def frames_of(strategy: str, **settings: Any) -> Any:
    from chapter19_9.train import train

    return train(strategy, steps=4, lifecycle_step=3, **settings).lifecycle
