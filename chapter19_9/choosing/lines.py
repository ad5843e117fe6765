"""The PyTorch lines of a recommended start, as text. They continue a program that has ``torch``, a ``model`` whose
blocks are ``model.blocks``, a ``device``, and a process group."""

from __future__ import annotations

SHORT = {
    "single": "one device",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero_redundancy": "ZeRO-1",
    "fsdp2_no_reshard": "FSDP2 False",
    "fsdp2": "FSDP2 True",
}

_CHECKPOINTING = """\
from functools import partial
from torch.utils.checkpoint import checkpoint

for block in model.blocks:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
"""
_DDP = """\
from torch.nn.parallel import DistributedDataParallel

ids = None if device.type == "cpu" else [device]
model = DistributedDataParallel(model.to(device), device_ids=ids, gradient_as_bucket_view=True)
"""
_DDP_BF16 = """\
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

model.register_comm_hook(None, bf16_compress_hook)  # gradients travel in 16 bits
"""
_FSDP2 = """\
from torch.distributed.fsdp import {names}

model.to(device)
{policy}for block in model.blocks:  # first the blocks, then the root
    fully_shard(block, {arguments})
fully_shard(model, {arguments})
"""
_POLICY = "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n"
_ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)\n"
_ZERO = """\
from torch.distributed.optim import ZeroRedundancyOptimizer

adamw = {"optimizer_class": torch.optim.AdamW, "lr": 3e-4, "fused": True}
optimizer = ZeroRedundancyOptimizer(model.parameters(), **adamw)
"""
_ZERO1 = """\
from chapter19_9.strategies import zero1  # by hand; DeepSpeed's stage 1 does the same

model = zero1.shard(model, device, dtype=torch.bfloat16)
optimizer = zero1.optimizer(model, lr=3e-4)
"""
_STEP = """\

def step(tokens, targets):
    optimizer.zero_grad()
    {autocast}loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()
"""


def write(strategy: str, precision: str, checkpointing: bool) -> str:
    """The lines for one of the strategies in ``SHORT``. ValueError for another."""
    if strategy not in SHORT:
        raise ValueError(f"strategy is {strategy!r}: there are lines for {', '.join(SHORT)}")
    mixed = precision == "bf16"
    parts = [_CHECKPOINTING] if checkpointing else []
    if strategy == "zero1":
        parts.append(_ZERO1)
    elif strategy.startswith("fsdp2"):
        names = "MixedPrecisionPolicy, fully_shard" if mixed else "fully_shard"
        arguments = f"{'mp_policy=policy, ' if mixed else ''}reshard_after_forward={strategy == 'fsdp2'}"
        parts.append(_FSDP2.format(names=names, policy=_POLICY if mixed else "", arguments=arguments) + _ADAMW)
    else:
        parts.append("model.to(device)\n" if strategy == "single" else _DDP)
        if mixed and strategy != "single":
            parts.append(_DDP_BF16)
        parts.append(_ZERO if strategy == "zero_redundancy" else _ADAMW)
    # weights that stay in 32 bits are cast where they are used; the others have 16 already
    casts = mixed and strategy in ("single", "ddp", "zero_redundancy")
    autocast = "with torch.autocast(device.type, dtype=torch.bfloat16):\n        " if casts else ""
    return "\n".join(parts) + _STEP.format(autocast=autocast)
