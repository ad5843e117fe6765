"""What DeepSpeed's four stages share: ``deepspeed.initialize`` makes one engine of model and optimizer.

The engine has ways of its own where PyTorch has none: ``engine.backward(loss)``, ``engine.step()``. What the stages
shard and send is said in their files, ``deepspeed0`` to ``deepspeed3``. Settings are DeepSpeed's own except where they
hide the stage at this size: buckets of 2 GB, stage 3's tensors below 100 000 elements that stay whole and weights that
it keeps for 10^9 more elements, and clipping to norm 1, which it does unless told otherwise.

The extra ``deepspeed`` installs it. API: ``deepspeed.initialize``. Source: deepspeed.readthedocs.io.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chapter19_9.strategies.shards import all_gather, blocks, check_plain, entries, place


def engine(
    model: nn.Module, device: torch.device, stage: int, bucket_mb: float | None = None, **settings: Any
) -> nn.Module:
    """DeepSpeed's engine for this model, with AdamW whose learning rate ``optimizer`` sets.

    bucket_mb: MiB of gradients that are reduced at once; default the largest unit, a block or what is in none.
    settings: of ``zero_optimization``. Raises ValueError without a process group, and for a bad ``bucket_mb``.
    """
    if not dist.is_initialized():
        raise ValueError("DeepSpeed needs a process group, also for one rank: run it with launch()")
    if bucket_mb is not None and not bucket_mb > 0:
        raise ValueError(f"bucket_mb is {bucket_mb!r}: it must be above 0")
    check_plain(model)
    units: Counter[str] = Counter()
    for unit, entry in entries(model, blocks(model)):
        units[unit] += entry.parameter.numel()
    bucket = max(units.values()) if bucket_mb is None else max(1, int(bucket_mb * 2**20 / 4))
    zero = {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": False, **settings}
    with _contained(device):
        import deepspeed

        # Else it compiles an operator for inference into the home folder, for a minute.
        deepspeed.ops.__compatible_ops__ = {}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made, *_ = deepspeed.initialize(
            model=model.to(device),
            model_parameters=trained,
            optimizer=torch.optim.AdamW(trained, lr=0.0),
            config={
                # the loop cuts its own batches; DeepSpeed asks for a number to count samples with
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": zero,
            },
        )
    return made


@contextmanager
def _contained(device: torch.device) -> Iterator[None]:
    """Environment that DeepSpeed reads and changes, put back afterwards; and a folder for what torch would cache."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        # Without the second, kernels that nothing here uses are prepared for compiling: ten seconds a rank.
        os.environ.update(DS_ACCELERATOR=device.type, TORCHDYNAMO_DISABLE="1", TORCHINDUCTOR_CACHE_DIR=folder)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class Stepper:
    """The engine's optimizer, as the loop knows one.

    ``engine.step()`` forgets the gradients. Here they are held until ``zero_grad``, as they are with every other
    strategy, so that they can be measured after the step: M_G / N that DeepSpeed alone would not have in it.
    """

    def __init__(self, model: Any) -> None:
        self.engine, self.zero = model, model.optimizer
        self.optim = getattr(self.zero, "optimizer", self.zero)  # stage 0 has no optimizer around this one
        vars(model)["averaged"] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The model's parameters that the engine trains; the inner optimizer has flat copies in their place."""
        if self.zero is self.optim:
            return self.optim.param_groups
        return [{"params": group} for group in _groups(self.zero)]

    @property
    def state(self) -> dict[Any, Any]:
        """What this rank keeps for the optimizer: its states, and the copy of its weights that it trains."""
        copies = getattr(self.zero, "single_partition_of_fp32_groups", [])
        copies = copies or getattr(self.zero, "fp32_partitioned_groups_flat", [])
        return {**self.optim.state, "weights": [copy.detach() for copy in copies]}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()
        vars(self.engine)["averaged"] = []

    def step(self) -> None:
        """``engine.step()``. Every rank must call it."""
        whole = [(parameter, parameter.grad) for parameter in self.engine.parameters()]
        vars(self.engine)["averaged"] = gradient_parts(self.engine)
        self.engine.step()
        if self.zero is self.optim:
            for parameter, gradient in whole:
                parameter.grad = gradient


def _groups(zero: Any) -> list[list[nn.Parameter]]:
    """The trained parameters of stage 1 or 2, else of stage 3, in the order in which they are laid together."""
    return zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.fp16_groups


def optimizer(model: Any, lr: float) -> Stepper:
    """The engine's AdamW with torch's defaults."""
    stepper = Stepper(model)
    for group in stepper.optim.param_groups:
        group["lr"] = lr
    return stepper


def backward(model: Any, loss: Tensor) -> None:
    """Backward, and what the stage reduces of the gradients."""
    model.backward(loss)


@contextmanager
def accumulating(model: Any) -> Iterator[None]:
    """Backward inside it is not the last before the step."""
    model.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        model.set_gradient_accumulation_boundary(True)


def gradient_parts(model: Any) -> list[Tensor]:
    """This rank's parts of the averaged gradients, of stages 1 to 3."""
    found = getattr(model.optimizer, "averaged_gradients", {})
    return [part for parts in found.values() if parts is not None for part in parts] or vars(model)["averaged"]


def parameter_parts(model: Any) -> list[Tensor]:
    """This rank's parts of stage 3's parameters, which are empty themselves."""
    return [parameter.ds_tensor for parameter in model.module.parameters()]


def standing(model: Any) -> list[Tensor]:
    """Stage 3's buffers, which stay between steps: the parts of the gradients, and the bucket."""
    return [model.optimizer.grad_partitions_flat_buffer, *(b.buffer for b in model.optimizer.ipg_buckets.values())]


def gathered(model: Any, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each whole parameter, or averaged gradient. Every rank must go through all of them."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    if not gradients:
        from deepspeed import zero

        for parameter, name in names.items():
            with zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()
        return
    parts = gradient_parts(model)
    trained: list[Any] = [parameter for group in _groups(model.optimizer) for parameter in group]
    if hasattr(model.optimizer, "bit16_groups"):  # all parameters in one vector
        sizes = [parameter.shape for parameter in trained]
        whole = _whole(torch.cat([part.reshape(-1) for part in parts]))
        pieces: Any = whole.split([*(size.numel() for size in sizes), whole.numel() - sum(s.numel() for s in sizes)])
    else:
        sizes = [parameter.ds_shape for parameter in trained]
        pieces = [_whole(part)[: size.numel()] for part, size in zip(parts, sizes, strict=True)]
    for parameter, piece, size in zip(trained, pieces, sizes, strict=False):
        yield names[parameter], piece.view(size)


def _whole(part: Tensor) -> Tensor:
    whole = part.new_empty(part.numel() * place()[1])
    all_gather(whole, part)
    return whole
