"""The registry: what each strategy shards, when it communicates, and in whose API.

    >>> get("ddp").communicates
    (Exchange(collective='all_reduce', of='gradients', when='backward'),)

Reading it needs no torch. Each strategy is a module of this package with

    shard(model, device, **options) -> model            places the model and wraps or shards it
    optimizer(model, lr) -> torch.optim.Optimizer       made from what shard returned
    accumulating(model) -> context manager              optional: backward inside it is not the step's last
    backward(model, loss)                               optional: where it is not loss.backward()
    gradient_parts(model) -> tensors                    where gradients end in parts: this rank's
    gathered(model, gradients=False) -> (name, tensor)  where model.parameters() are not the whole ones
    parameter_parts(model) -> tensors                   where model.parameters() are not this rank's parts either
    standing(model) -> tensors                          where buffers outlive a step: these

and a ``dtype`` among the options, where ``mixed`` is not "autocast".
"""

from __future__ import annotations

from dataclasses import replace

from chapter19_9.strategies.facts import Exchange, Strategy

__all__ = ["OPTIONAL", "STRATEGIES", "Exchange", "Strategy", "get"]

_ZERO = "ZeRO (arXiv 1910.02054)"
_GATHER = Exchange("all_gather", "parameters", "forward", every="pass")
_GATHER_AGAIN = Exchange("all_gather", "parameters", "backward", every="pass")
_REDUCE = Exchange("reduce_scatter", "gradients", "backward")
_REDUCE_EACH = Exchange("reduce_scatter", "gradients", "backward", every="pass")
_NEW = Exchange("all_gather", "parameters", "optimizer")

_FULL_SHARD = Strategy(
    name="fsdp1",
    title="FSDP1 FULL_SHARD",
    api="torch.distributed.fsdp.FullyShardedDataParallel",
    source="PyTorch FSDP (arXiv 2304.11277)",
    parameters="sharded",
    gradients="sharded",
    optimizer="sharded",
    communicates=(_GATHER, replace(_GATHER_AGAIN, part="blocks"), _REDUCE),
    cut="flat",
    units="blocks",
    align=4,
    mixed="gathered",
)

_RESHARD = Strategy(
    name="fsdp2",
    title="FSDP2, reshard after forward",
    api="torch.distributed.fsdp.fully_shard",
    source="torch.distributed.fsdp.fully_shard documentation",
    parameters="sharded",
    gradients="sharded",
    optimizer="sharded",
    communicates=(_GATHER, _GATHER_AGAIN, _REDUCE),
    cut="rows",
    units="blocks",
    mixed="gathered",
)

_ALL = (
    Strategy(
        name="single",
        title="each rank alone",
        api="torch.nn.Module",
        source="torch.optim documentation",
    ),
    Strategy(
        name="ddp",
        title="DistributedDataParallel",
        api="torch.nn.parallel.DistributedDataParallel",
        source="PyTorch Distributed (arXiv 2006.15704)",
        communicates=(Exchange("all_reduce", "gradients", "backward"),),
    ),
    Strategy(
        name="zero1",
        title="ZeRO-1 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os",
        optimizer="sharded",
        communicates=(Exchange("reduce_scatter", "gradients", "optimizer"), _NEW),
        cut="flat",
        units="blocks",
        mixed="copies",
        reduces="16 bits",
    ),
    Strategy(
        name="zero2",
        title="ZeRO-2 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os+g",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_REDUCE_EACH, _NEW),
        cut="flat",
        units="blocks",
        mixed="copies",
        reduces="16 bits",
    ),
    Strategy(
        name="zero3",
        title="ZeRO-3 by hand",
        api="torch.distributed",
        source=f"{_ZERO}, P_os+g+p",
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _GATHER_AGAIN, _REDUCE_EACH),
        cut="flat",
        units="blocks",
        mixed="gathered",
        reduces="16 bits",
    ),
    Strategy(
        name="zero_redundancy",
        title="DDP + ZeroRedundancyOptimizer",
        api="torch.distributed.optim.ZeroRedundancyOptimizer",
        source="torch.distributed.optim documentation",
        optimizer="sharded",
        communicates=(
            Exchange("all_reduce", "gradients", "backward"),
            Exchange("broadcast", "parameters", "optimizer"),
        ),
        cut="tensors",
    ),
    _FULL_SHARD,
    replace(
        _FULL_SHARD,
        name="fsdp1_grad_op",
        title="FSDP1 SHARD_GRAD_OP",
        communicates=(replace(_GATHER, every="step"), _REDUCE),
    ),
    _RESHARD,
    replace(
        _RESHARD,
        name="fsdp2_no_reshard",
        title="FSDP2, no reshard after forward",
        communicates=(_GATHER, _REDUCE),
    ),
    replace(
        _RESHARD,
        name="fsdp2_root_only",
        title="FSDP2 on the root only",
        communicates=(_GATHER, _REDUCE),
        units="model",
    ),
)

_DEEPSPEED = Strategy(
    name="", title="", api="deepspeed.initialize", source="deepspeed.readthedocs.io", extra="deepspeed"
)
_STAGES = (
    replace(
        _DEEPSPEED,
        name="deepspeed0",
        title="DeepSpeed stage 0",
        communicates=(Exchange("all_reduce", "gradients", "backward"),),
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed1",
        title="DeepSpeed stage 1",
        gradients="sharded",  # when backward is over
        optimizer="sharded",
        communicates=(Exchange("all_reduce", "gradients", "backward"), _NEW),
        cut="even",
        masters=True,
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed2",
        title="DeepSpeed stage 2",
        gradients="sharded",
        optimizer="sharded",
        communicates=(Exchange("all_reduce", "gradients", "backward", every="pass"), _NEW),
        cut="even",
        masters=True,
    ),
    replace(
        _DEEPSPEED,
        name="deepspeed3",
        title="DeepSpeed stage 3",
        parameters="sharded",
        gradients="sharded",
        optimizer="sharded",
        communicates=(_GATHER, _GATHER_AGAIN, _REDUCE_EACH),
        cut="flat",
        units="tensors",
        masters=True,
        norm=8,
    ),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}
OPTIONAL = {strategy.name: strategy for strategy in _STAGES}
"""Strategies that need an extra: in no list unless asked for, so that lessons do not depend on what is installed."""


def get(name: str) -> Strategy:
    """The strategy of that name, installed or not. ValueError says which names there are."""
    found = STRATEGIES.get(name) or OPTIONAL.get(name)
    if found is None:
        raise ValueError(f"strategy is {name!r}: it must be one of {', '.join([*STRATEGIES, *OPTIONAL])}")
    return found
