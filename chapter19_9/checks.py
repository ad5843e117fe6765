"""Misuse that trains on quietly with wrong numbers, refused before the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from d2l_utils.batch import nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chapter19_9.strategies import Strategy


def check_batch(batch: int, ranks: int, accumulation: int = 1) -> int:
    """Samples of one rank and backward pass. ValueError when ``batch`` does not divide by ranks x
    accumulation."""
    for name, value in (("batch", batch), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
    parts = ranks * accumulation
    if batch % parts:
        near = " or ".join(map(str, nearest(batch, parts)))
        raise ValueError(
            f"batch is {batch}: it must divide by ranks x accumulation = {ranks} x {accumulation} = {parts}; "
            f"nearest: {near}"
        )
    return batch // parts


def micro_batches(
    batch: int, ranks: int, accumulation: int = 1, samples: Sequence[int] | None = None
) -> list[list[int]]:
    """Samples of each backward pass, rank by rank. Without ``samples`` all are equal, else each rank's add up to its
    own number, as equal as may be; every rank makes as many passes. ValueError when these do not fit."""
    if samples is None:
        return [[check_batch(batch, ranks, accumulation)] * accumulation] * ranks
    check_batch(batch, 1, 1)
    check_batch(ranks * accumulation, ranks, accumulation)
    if len(samples) != ranks or sum(samples) != batch or min(samples) < accumulation:
        raise ValueError(
            f"samples is {list(samples)}: it must be {ranks} numbers, one a rank, each at least accumulation = "
            f"{accumulation}, that add up to batch = {batch}"
        )
    return [[own // accumulation + (i < own % accumulation) for i in range(accumulation)] for own in samples]


def check_steps(steps: int, record_step: int | Collection[int] | None, lifecycle_step: int | None) -> set[int]:
    """The steps to record. ValueError when there are no steps, or one that is to be recorded is not among them; a step
    is recorded for one purpose."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}: it must be a whole number of at least 1")
    wanted = set(record_step) if isinstance(record_step, Collection) else {record_step} - {None}
    if not wanted <= set(range(steps)):
        raise ValueError(f"record_step is {record_step!r}: it must be from 0 to {steps - 1}, or None")
    if lifecycle_step is not None and (lifecycle_step not in range(steps) or lifecycle_step in wanted):
        raise ValueError(f"lifecycle_step is {lifecycle_step!r}: it must be a step of its own from 0 to {steps - 1}")
    return {step for step in wanted if step is not None}


def check_checkpoints(facts: Strategy, ranks: int, precision: str, average: bool) -> None:
    """ValueError where a checkpoint would not be the training's state: unequal copies, a state that is not in it."""
    if facts.extra:
        raise ValueError(f"checkpoints: strategy {facts.name!r} keeps its states, and saves them, in its own way")
    if facts.name == "single" and ranks > 1 and not average:
        raise ValueError("checkpoints: with strategy 'single' each rank has other weights, and one copy is saved")
    if precision == "fp16":
        raise ValueError("checkpoints: precision 'fp16' has a loss scale, which is not saved; allowed: fp32, bf16")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ValueError unless the optimizer holds the parameters that the model has now, or the shards that stand
    for them: made too early, it trains old ones."""
    has = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for flat in vars(model).get("flats", []):  # hand-written ZeRO trains shards in place of these
        trained -= {id(entry.parameter) for entry in flat.entries if id(entry.parameter) in has}
        has[id(flat.shard)] = f"shard of {flat.entries[0].names[0]}"
        trained |= {id(flat.shard)} if flat.trained else set()
    holds = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [has[key] for key in trained - holds]:
        raise ValueError(
            f"the optimizer does not hold {len(missing)} of the model's parameters, "
            f"such as {min(missing)!r}: make it after shard()"
        )
    if foreign := len(holds - has.keys()):
        raise ValueError(
            f"the optimizer holds {foreign} parameters that the model does not have: make it after shard()"
        )


def check_gradients(model: nn.Module) -> None:
    """ValueError naming the parameters that backward left without a gradient, and why: FSDP2 was told to keep gradients
    whole, or forward did not use them.

    DDP waits for every gradient: it trains one step and stops in the second, whatever the cause. Whether gradients are
    averaged yet is not asked: inside ``no_sync``, DDP's and FSDP1's are this rank's own.
    """
    if waiting := _waiting(model):
        raise ValueError(f"the gradients of {', '.join(map(repr, waiting))} {_WAIT.format(sum(waiting.values()))}")
    # a parameter of no elements is one whose shard is empty here
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None and p.numel()]
    if unused:
        raise ValueError(
            f"no gradient for {', '.join(map(repr, unused))}: forward did not use them. DDP would stop in "
            "its second step: freeze or remove them, or wrap with find_unused_parameters=True"
        )


_WAIT = (
    "wait unsharded on this rank ({:,} B): backward ran with gradient sync off. Call "
    "model.set_requires_gradient_sync(True) before the last backward of a step"
)


def _waiting(model: nn.Module) -> dict[str, int]:
    """{parameter: bytes} of the gradients that FSDP2 keeps whole on this rank."""
    from d2l_utils.memory import unsharded_gradients

    return {name: gradient.nbytes for name, gradient in unsharded_gradients(model)}


def unchanged(model: nn.Module, steps: int, lr: float) -> RuntimeError:
    """The error of a training that has changed no weight on any rank, with its cause where that can be seen."""
    why = "the optimizer was given no gradients, it trains other tensors than the model's, or lr is too small"
    if waiting := _waiting(model):
        why = f"gradients {_WAIT.format(sum(waiting.values()))}"
    return RuntimeError(f"{steps} steps at lr={lr:g} changed no weight: {why}")


_checked: set[tuple[str, int]] = set()


def check_averages_once(device: torch.device) -> None:
    """``check_averages``, in a process once for each kind of device and number of ranks: some milliseconds."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        key = device.type, dist.get_world_size()
        if key not in _checked:
            check_averages()
            _checked.add(key)


def check_averages() -> dict[str, float]:
    """Sum and average known numbers over the ranks, with the collectives and operations that DDP and FSDP2 use.

    Returns {collective and operation: what came out}. RuntimeError when one is wrong: some releases of gloo give the sum
    where the average was asked for, and training goes on with gradients that are N times too large. Every rank must call
    it; it can be launched.
    """
    import torch
    import torch.distributed as dist

    from d2l_utils.device import rank_device

    rank, n, device = dist.get_rank(), dist.get_world_size(), rank_device()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the first since torch 2.13
    found = {}
    for op, expected in (("SUM", n * (n + 1) / 2), ("AVG", (n + 1) / 2)):
        whole, part = torch.full((n,), rank + 1.0, device=device), torch.empty(1, device=device)
        scatter(part, whole, op=getattr(dist.ReduceOp, op))
        dist.all_reduce(whole, op=getattr(dist.ReduceOp, op))
        for collective, value in (("reduce_scatter", part.item()), ("all_reduce", whole[0].item())):
            found[f"{collective} {op}"] = value
            if abs(value - expected) > 1e-3 * expected:
                raise RuntimeError(
                    f"{collective} with ReduceOp.{op} is wrong in this PyTorch ({torch.__version__}, on {device.type}): of "
                    f"the numbers 1 to {n} it gave {value:g}, right is {expected:g}. Gradients would be "
                    f"{value / expected:g} times as large as they should be"
                )
    return found


def check_same(value: int, name: str) -> int:
    """``value``, when every rank gave the same. Every rank must call it, before a loop whose length it is.

    Raises ValueError on every rank when they differ: those with more batches would wait for those with fewer.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return value
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise ValueError(
            f"{name} differs between the ranks: {values}. The others would wait in the next collective: "
            "cut to the smallest, pad, or use torch.distributed.algorithms.Join"
        )
    return value
