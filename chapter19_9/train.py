"""The one training loop: every strategy goes through it, so that a difference in results is a difference in
strategy.

    run = launch(train, world_size=4, strategy="ddp", steps=5)
    run.results[0].losses

Step s trains on the same ``batch`` pieces of text at any world size: rank r takes the r-th part, so N ranks
together see what one process sees.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chapter19_9 import strategies
from chapter19_9.checks import check_batch, check_gradients, check_optimizer
from chapter19_9.strategies.shards import global_norm
from d2l_utils.agree import digest, largest_difference, ranks_agree
from d2l_utils.device import rank_device
from d2l_utils.memory import Held, held
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

__all__ = [
    "Result",
    "average_gradients",
    "check_batch",
    "check_optimizer",
    "largest_difference",
    "ranks_agree",
    "train",
]

DEFAULT = TransformerConfig()


@dataclass(frozen=True)
class Result:
    """What one rank saw of a training run. Lists have one value a step.

    losses         : mean loss over the whole global batch, in nats; the same on every rank. Before the
                     step's update.
    local_losses   : mean loss over this rank's own part.
    gradient_norms : 2-norm of the whole gradient, after any averaging and before any clipping.
    seconds        : forward, backward and optimizer step; the first includes torch's own warm-up.
    differences    : largest difference between the ranks' weights after the step; empty unless asked for.
    held           : bytes held after the last step, gradients included.
    agree          : all ranks end with exactly the same weights. Of weights in shards: each rank gathers the
                     same whole ones.
    changed        : training changed the weights.
    recording      : the recorded step (``d2l_utils.events.Recording``), or None.
    peak           : most bytes in the recorded step: the model states at its start, and what it took on top of
                     them (gathered weights, gradients, activations); None unless ``allocations``.
    weights, gradients : whole ones by parameter name, on the CPU, after the last step; None unless asked for.
    """

    strategy: str
    rank: int
    world_size: int
    losses: list[float]
    local_losses: list[float]
    gradient_norms: list[float]
    seconds: list[float]
    differences: list[float]
    held: Held
    agree: bool
    changed: bool
    recording: Any = None
    peak: int | None = None
    weights: dict[str, Tensor] | None = None
    gradients: dict[str, Tensor] | None = None


def train(
    strategy: str = "ddp",
    config: TransformerConfig = DEFAULT,
    *,
    steps: int = 5,
    batch: int = 8,
    accumulation: int = 1,
    lr: float = 1e-3,
    bucket_mb: float | None = None,
    options: Mapping[str, Any] | None = None,
    clip: float | None = None,
    average: bool = False,
    sync_every: bool = False,
    seed_by_rank: bool = False,
    record_step: int | None = None,
    allocations: bool = False,
    differences: bool = False,
    weights: bool = False,
) -> Result:
    """Train the toy Transformer on this rank's part of the text, as one of the ranks of the process group.

    batch         : samples in a step over all ranks (the global batch), each of ``config.length`` tokens.
    accumulation  : backward passes in a step; the global batch must divide by ranks x accumulation.
    bucket_mb     : DDP's bucket size in MiB.
    options       : the strategy's own settings, by the names that its ``shard`` gives them.
    clip          : scale the whole gradient down to this 2-norm before the optimizer step.
    average       : average the gradients by hand after backward, with ``average_gradients``.
    sync_every    : let every backward of an accumulation communicate, not the last one only.
    seed_by_rank  : give each rank's model other first weights; a strategy that starts by making them equal
                    must cope.
    record_step   : number of the step to record, from 0; ``allocations`` adds its memory curve.
    differences, weights : measure these for the result too.

    Raises ValueError before the first step when an argument does not fit, or the ranks start from different
    weights.
    """
    rank, n, device = _place()
    facts = strategies.get(strategy)
    micro = check_batch(batch, n, accumulation)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}: it must be a whole number of at least 1")
    if average and facts.gradients == "sharded":
        raise ValueError(
            f"average is True: strategy {strategy!r} averages gradients itself, and keeps only shards of them"
        )
    if record_step is not None and record_step not in range(steps):
        raise ValueError(f"record_step is {record_step!r}: it must be from 0 to {steps - 1}, or None")
    module = facts.load()
    settings = {**(options or {}), **({"bucket_mb": bucket_mb} if bucket_mb is not None else {})}
    if unknown := settings.keys() - inspect.signature(module.shard).parameters.keys():
        raise ValueError(f"{', '.join(unknown)}: strategy {strategy!r} has no such setting")

    plain = Transformer(replace(config, seed=config.seed + rank) if seed_by_rank else config)
    model = module.shard(plain, device, **settings)
    optimizer = module.optimizer(model, lr)
    if facts.parameters == "replicated" and not ranks_agree(plain):
        apart = largest_difference(plain)
        raise ValueError(
            f"the ranks start from different weights, {apart:.3g} apart: strategy {strategy!r} does not make them equal"
        )
    gathered = getattr(module, "gathered", None)
    gradients_of = partial(gathered, model, gradients=True) if gathered else partial(_whole, plain, gradients=True)
    # of weights that every rank has whole, each must show its own
    weights_of = partial(gathered, model) if gathered and facts.parameters == "sharded" else partial(_whole, plain)
    parts = getattr(module, "gradient_parts", None)
    check_optimizer(model, optimizer)
    pause = getattr(module, "accumulating", None)
    pausing = nullcontext if pause is None or sync_every else lambda: pause(model)
    before = _digest(weights_of())

    kept: dict[str, list[float]] = {name: [] for name in ("losses", "local", "norms", "seconds", "differences")}
    recording, peak = None, None
    for step in range(steps):
        rows = sequences(config.length, batch, offset=step * batch).chunk(n)[rank].to(device)
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        optimizer.zero_grad()  # before the recording: it cannot see the end of what was allocated earlier
        at_start = held(model, optimizer).total + _buckets(model)
        with _recorder(model, optimizer, step == record_step, allocations) as recorded:
            start = _now(device)
            loss = forward_backward(model, tokens, targets, [micro] * accumulation, pausing)
            if average:
                average_gradients(model)
            norm = None if clip is None else gradient_norm(model, parts, clip)
            optimizer.step()
            kept["seconds"].append(_now(device) - start)
        # What is measured comes after the step, so that it is in no timing and no recording.
        if recorded is not None:
            recording = recorded
            peak = None if recorded.peak is None else at_start + recorded.peak
        kept["local"].append(loss.item())
        kept["losses"].append(_mean(loss))
        kept["norms"].append(gradient_norm(model, parts) if norm is None else norm)
        if differences:
            kept["differences"].append(largest_difference([tensor for _, tensor in weights_of()]))
    after = _digest(weights_of())
    return Result(
        strategy=strategy,
        rank=rank,
        world_size=n,
        losses=kept["losses"],
        local_losses=kept["local"],
        gradient_norms=kept["norms"],
        seconds=kept["seconds"],
        differences=kept["differences"],
        held=held(model, optimizer, gradients=parts(model) if parts else ()),
        agree=ranks_agree([torch.frombuffer(bytearray(after), dtype=torch.uint8).to(device)]),
        changed=after != before,
        recording=recording,
        peak=peak,
        weights={name: tensor.cpu().clone() for name, tensor in weights_of()} if weights else None,
        gradients={name: tensor.cpu().clone() for name, tensor in gradients_of()} if weights else None,
    )


def forward_backward(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    parts: Sequence[int],
    pausing: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Forward and backward over consecutive ``parts`` (samples each) of tokens, (samples, length); returns
    the mean loss.

    Each part's loss is weighted by its share of the samples, so unequal parts give the gradient of the
    whole too. All but the last run inside ``pausing()``. Raises ValueError when the parts are not the
    whole.
    """
    if sum(parts) != len(tokens) or min(parts, default=0) < 1:
        raise ValueError(f"parts is {list(parts)}: they must be at least 1 and add up to {len(tokens)} samples")
    total = torch.zeros((), device=tokens.device)
    pieces = list(zip(tokens.split(list(parts)), targets.split(list(parts)), strict=True))
    for i, (x, y) in enumerate(pieces):
        with nullcontext() if i == len(pieces) - 1 else pausing():
            loss = model(x, y) * (len(x) / len(tokens))
            loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """g = (1/N) sum of the ranks' g, by hand: one all-reduce for each parameter. Every rank must call it.

    Raises ValueError when a parameter got no gradient here: the other ranks would wait for it.
    """
    check_gradients(model)
    if not dist.is_initialized():
        return
    for parameter in model.parameters():
        if parameter.grad is not None:  # a frozen one has none
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def gradient_norm(
    model: nn.Module, parts: Callable[[nn.Module], Iterable[Tensor]] | None = None, limit: float | None = None
) -> float:
    """2-norm of all of the model's gradients, as one vector; scaled down to ``limit`` when it is more.

    parts: of a gradient that lies in parts on the ranks, gives this rank's; else this rank has all of it.
    """
    if parts is not None:
        return global_norm(parts(model), limit)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return global_norm(gradients, limit, alone=True)


def _whole(model: nn.Module, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter or gradient of a model that every rank holds whole."""
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            yield name, tensor


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """32 bytes that tell these exact tensors from others; looks at one at a time."""
    return hashlib.sha256(b"".join(digest([tensor]) for _, tensor in tensors)).digest()


def _buckets(model: nn.Module) -> int:
    """Bytes of DDP's buckets, which stay when the gradients that are views of them are forgotten."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _place() -> tuple[int, int, torch.device]:
    """(rank, world size, device). Without a process group: one rank on the CPU, so that a notebook touches
    no accelerator."""
    if not dist.is_initialized():
        return 0, 1, torch.device("cpu")
    device = rank_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return dist.get_rank(), dist.get_world_size(), device


def _mean(loss: Tensor) -> float:
    """The mean over the ranks: what rank 0 prints is otherwise only rank 0's loss."""
    value = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device.index)
    return time.perf_counter()


def _recorder(model: nn.Module, optimizer: Any, wanted: bool, allocations: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    from d2l_utils.record import record

    return record(model, optimizer, allocations=allocations)
