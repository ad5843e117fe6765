"""The one training loop: every strategy goes through it, so that a difference in results is a difference in
strategy.

    run = launch(train, world_size=4, strategy="ddp", steps=5)
    run.results[0].losses

Step s trains on the same ``batch`` pieces of text at any world size: rank r takes the r-th part, so N ranks
together see what one process sees. What is measured around a step is in ``watching``, what 16 bits change in
``precision``, what goes together in ``combining``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chapter19_9 import combining, strategies
from chapter19_9.checks import (
    check_averages_once,
    check_batch,
    check_checkpoints,
    check_gradients,
    check_optimizer,
    check_steps,
    micro_batches,
    unchanged,
)
from chapter19_9.precision import Mixed, checkpoint_blocks
from chapter19_9.recorded import Recorded, unsharded
from chapter19_9.result import Result
from chapter19_9.resuming.checkpoint import Checkpoints
from chapter19_9.watching import (
    at_hand,
    bucket_bytes,
    digest_of,
    gradient_norm,
    gradient_storages,
    mean_over_ranks,
    now,
    on_any_rank,
    recorder,
    where,
    whole,
)
from d2l_utils.agree import largest_difference, ranks_agree
from d2l_utils.memory import held
from d2l_utils.text import sequences
from d2l_utils.throttle import Link, throttles
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


def train(
    strategy: str = "ddp",
    config: TransformerConfig = DEFAULT,
    *,
    steps: int = 5,
    batch: int = 8,
    accumulation: int = 1,
    samples: Sequence[int] | None = None,
    precision: str = "fp32",
    checkpointing: bool = False,
    lr: float = 1e-3,
    bucket_mb: float | None = None,
    options: Mapping[str, Any] | None = None,
    clip: float | None = None,
    average: bool = False,
    sync_every: bool | None = None,
    seed_by_rank: bool = False,
    link: Link | Sequence[Link | None] | None = None,
    record_step: int | Collection[int] | None = None,
    allocations: bool = False,
    lifecycle_step: int | None = None,
    outliving: bool = False,
    differences: bool = False,
    weights: bool = False,
    agreement: bool = True,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Train the toy Transformer on this rank's part of the text, as one of the ranks of the process group.

    batch         : samples in a step over all ranks (the global batch), each of ``config.length`` tokens.
    accumulation  : backward passes in a step; the global batch must divide by ranks x accumulation.
    samples       : of the global batch, each rank's, where they are not to be equal; they add up to ``batch``.
    precision     : "fp32", "bf16" or "fp16", what forward and backward compute in; weights are trained in float32.
    checkpointing : keep only each block's input for backward, and compute its forward again there.
    bucket_mb     : DDP's bucket size in MiB.
    options       : the strategy's own settings, by the names that its ``shard`` gives them.
    clip          : scale the whole gradient down to this 2-norm before the optimizer step.
    average       : average the gradients by hand after backward, with ``average_gradients``.
    sync_every    : True lets every backward of an accumulation exchange gradients, False the last one only. None
                    is False where the strategy can wait.
    seed_by_rank  : give each rank's model other first weights; a strategy that starts by making them equal
                    must cope.
    link          : hold the steps' collectives back as a link of this bandwidth and latency would
                    (``d2l_utils.throttle``); None lets them go at once. Several: one for each step.
    record_step   : number of the step to record, from 0, or several; ``allocations`` adds the memory curve.
    lifecycle_step: number of another step, to record for the lifecycle; float32 only. ``outliving`` counts as gradients
                    there what keeps its memory when they are forgotten, such as DDP's buckets.
    differences, weights : measure these for the result too. agreement: ask whether the ranks agree at the end, which
                    gathers weights that are in shards, one by one.
    checkpoints   : where to save, and to go on from the newest; ``steps`` counts those behind it too, and one of them
                    that was to be recorded is not. Another ``batch`` has to be asked for, by
                    ``Checkpoints(another_batch=True)``; what else is no state is the caller's to keep.

    Raises ValueError before the first step when an argument does not fit, or the ranks start from different
    weights; RuntimeError when this PyTorch's collectives do not average, and at the end when no weight has changed.
    """
    rank, n, device = where()
    facts, settings = strategies.get(strategy), dict(options or {})
    combining.check(
        strategy,
        precision=precision,
        accumulation=accumulation,
        sync_every=sync_every,
        average=average,
        options=settings,
    )
    mine = micro_batches(batch, n, accumulation, samples)
    to_record = check_steps(steps, record_step, lifecycle_step)
    if checkpoints:
        check_checkpoints(facts, n, precision, average)
    if lifecycle_step is not None and ("dtype" in settings or precision != "fp32" or checkpointing):
        raise ValueError(f"lifecycle_step is {lifecycle_step}: a lifecycle is of fp32, not checkpointed")
    module, mixed = facts.load(), Mixed(precision, facts, device)
    settings |= mixed.settings | ({"bucket_mb": bucket_mb} if bucket_mb is not None else {})
    if unknown := settings.keys() - inspect.signature(module.shard).parameters.keys():
        raise ValueError(f"{', '.join(unknown)}: strategy {strategy!r} has no such setting")

    check_averages_once(device)  # a wrong average would train on, and the ranks would agree
    plain = Transformer(replace(config, seed=config.seed + rank) if seed_by_rank else config)
    sizes = unsharded(plain) if lifecycle_step is not None else {}
    if checkpointing:
        checkpoint_blocks(plain)
    model = module.shard(plain, device, **settings)
    optimizer = module.optimizer(model, lr)
    if facts.parameters == "replicated" and not ranks_agree(plain):
        apart = largest_difference(plain)
        raise ValueError(
            f"the ranks start from different weights, {apart:.3g} apart: strategy {strategy!r} does not make them equal"
        )
    gathered = getattr(module, "gathered", None)
    gradients_of = partial(gathered, model, gradients=True) if gathered else partial(whole, plain, gradients=True)
    # of weights that every rank has whole, each must show its own
    weights_of = partial(gathered, model) if gathered and facts.parameters == "sharded" else partial(whole, plain)
    parts = getattr(module, "gradient_parts", None)
    kept_of, standing = getattr(module, "parameter_parts", None), getattr(module, "standing", None)
    check_optimizer(model, optimizer)
    slowed = throttles(link, steps, model)
    backward = partial(module.backward, model) if hasattr(module, "backward") else Tensor.backward
    pause = getattr(module, "accumulating", None)
    pausing = nullcontext if pause is None or sync_every else lambda: pause(model)
    own_weights = kept_of or nn.Module.parameters
    first = checkpoints.resume(model, optimizer, steps, batch) if checkpoints else 0
    before = digest_of(at_hand(own_weights(model)))

    kept: dict[str, list[float]] = {name: [] for name in ("losses", "local", "norms", "seconds", "differences")}
    recordings, peak, saved, lifecycle = [], None, None, None
    own = [sum(passes) for passes in mine]
    for step in range(first, steps):
        rows = sequences(config.length, batch, offset=step * batch).split(own)[rank].to(device)
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        forgotten = gradient_storages(model) if outliving and step == lifecycle_step else []
        optimizer.zero_grad()  # before the recording: it cannot see the end of what was allocated earlier
        states = partial(held, model, optimizer, parameters=kept_of(model) if kept_of else ())
        at_start = states(gradients=standing(model) if standing else ()).total + bucket_bytes(model)
        watched = step in to_record, allocations, step == lifecycle_step, forgotten
        with slowed[step], recorder(model, optimizer, *watched) as (recorded, for_backward):
            start = now(device)
            loss = forward_backward(model, tokens, targets, mine[rank], pausing, mixed, batch / n, backward)
            if average:
                average_gradients(model)
            mixed.unscale(optimizer)
            norm = None if clip is None else gradient_norm(model, parts, clip)
            mixed.step(optimizer)
            kept["seconds"].append(now(device) - start)
        # What is measured comes after the step, so that it is in no timing and no recording.
        if step == lifecycle_step:
            lifecycle = Recorded(strategy, recorded, sizes, at_start)
        elif recorded is not None:
            recordings.append(recorded)
            peak = None if recorded.peak is None else at_start + recorded.peak
            saved = for_backward.bytes if for_backward else None
        kept["local"].append(loss.item())
        kept["losses"].append(mean_over_ranks(loss, own[rank] * n / batch))
        kept["norms"].append(gradient_norm(model, parts) if norm is None else norm)
        if differences:
            kept["differences"].append(largest_difference([tensor for _, tensor in weights_of()]))
        if checkpoints:
            checkpoints.after(step + 1, model, optimizer, batch)
    changed = on_any_rank(digest_of(at_hand(own_weights(model))) != before, device)
    if not changed and lr and precision != "fp16":  # whose loss scale may have left out every step
        raise unchanged(model, steps - first, lr)
    agree = None
    if agreement:
        after = digest_of(tensor for _, tensor in weights_of())
        agree = ranks_agree([torch.frombuffer(bytearray(after), dtype=torch.uint8).to(device)])
    return Result(
        strategy=strategy,
        rank=rank,
        world_size=n,
        losses=kept["losses"],
        local_losses=kept["local"],
        gradient_norms=kept["norms"],
        seconds=kept["seconds"],
        differences=kept["differences"],
        held=states(gradients=parts(model) if parts else ()),
        agree=agree,
        changed=changed,
        recordings=tuple(recordings),
        peak=peak,
        saved=saved,
        lifecycle=lifecycle,
        weights={name: tensor.cpu().clone() for name, tensor in weights_of()} if weights else None,
        gradients={name: tensor.cpu().clone() for name, tensor in gradients_of()} if weights else None,
        first=first,
    )


def forward_backward(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    parts: Sequence[int],
    pausing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    mixed: Mixed | None = None,
    share: float | None = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Forward and backward over consecutive ``parts`` (samples each) of tokens, (samples, length); returns
    the mean loss.

    Each part's loss is weighted by its samples, out of ``share``, so unequal parts give the gradient of the
    whole too. share: samples that a rank has on average, where ranks have unequal numbers; the mean over the ranks
    is then that of all samples. All but the last part run inside ``pausing()``, forward as well as backward.
    Raises ValueError when the parts are not the whole.
    """
    if sum(parts) != len(tokens) or min(parts, default=0) < 1:
        raise ValueError(f"parts is {list(parts)}: they must be at least 1 and add up to {len(tokens)} samples")
    computing, scale = (mixed.computing, mixed.scale) if mixed else (nullcontext, lambda loss: loss)
    total = torch.zeros((), device=tokens.device)
    pieces = list(zip(tokens.split(list(parts)), targets.split(list(parts)), strict=True))
    for i, (x, y) in enumerate(pieces):
        with nullcontext() if i == len(pieces) - 1 else pausing():
            with computing():
                loss = model(x, y)
            backward(scale(loss * (len(x) / (share or len(tokens)))))
        total += loss.detach() * (len(x) / len(tokens))
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
