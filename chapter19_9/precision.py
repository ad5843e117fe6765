"""What a precision and activation checkpointing change in the loop, for any strategy.

fp32 changes nothing. With bf16 and fp16 forward and backward compute in 16 bits, and weights are trained in 32. fp16
has too few exponents for small gradients: the loss is multiplied by a scale, the gradients are divided by it, and a
step whose gradients overflowed is left out, on all ranks or on none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chapter19_9.combining import check_precision
from chapter19_9.strategies import Strategy
from chapter19_9.strategies.shards import blocks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# torch's own first scale, 2**16, is found too large for a small model in its first steps, which are then left out
FIRST_SCALE = 2.0**10


class Mixed:
    """One precision for one strategy on one kind of device.

    settings : what the strategy's ``shard`` is told, where it computes in 16 bits by itself.
    """

    def __init__(self, precision: str, facts: Strategy, device: torch.device) -> None:
        check_precision(precision)
        self.device, self.dtype = device.type, DTYPES.get(precision)
        by_itself = self.dtype is not None and facts.mixed != "autocast"
        self.settings: dict[str, Any] = {"dtype": self.dtype} if by_itself else {}
        self.autocast = self.dtype is not None and not by_itself
        self.scaler: Any = None
        if self.dtype == torch.float16:
            self.scaler = _sharded_scaler(device) if facts.cut == "flat" else _scaler(device)

    def computing(self) -> AbstractContextManager[Any]:
        """Forward goes inside; backward does not."""
        return torch.autocast(self.device, self.dtype) if self.autocast else nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Any) -> None:
        """After the last backward, before anybody looks at the gradients. Every rank must call it."""
        if self.scaler is not None:
            for flat in getattr(optimizer, "flats", []):  # hand-written ZeRO-1 and 2 average in 16 bits
                flat.finish()
                flat.averaged = flat.shard.grad = flat.averaged.float()  # in which division loses nothing
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        """The optimizer's step; left out when a gradient is not finite. Every rank must call it."""
        if self.scaler is None:
            optimizer.step()
        else:
            # a fused AdamW would leave the step out by itself, and torch's sharded scaler tells it so in a wrong shape
            optimizer._step_supports_amp_scaling = False
            self.scaler.step(optimizer)
            self.scaler.update()
            for flat in getattr(optimizer, "flats", []):
                flat.shard.grad = None  # a step that was left out has not done it


def _scaler(device: torch.device) -> Any:
    """Looks at whole gradients, or at DTensors, for which torch asks all ranks."""
    return torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)


def _sharded_scaler(device: torch.device) -> Any:
    """Looks at this rank's shards, and asks the others."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device.type, init_scale=FIRST_SCALE, process_group=dist.group.WORLD)


def checkpoint_blocks(model: nn.Module) -> None:
    """Let each block keep its input only, and compute its forward again in backward. Before sharding.

    The order matters. Inside the block's call, sharding's hooks stand around the whole: the weights that were gathered
    for backward serve the second forward too. Around the call, the second forward would free them before backward:
    FSDP2 takes care of that, hand-written ZeRO-3 does not.
    """
    for name in blocks(model):
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
