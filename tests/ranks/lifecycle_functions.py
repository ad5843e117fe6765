"""What the ranks of test_lifecycle run."""

import torch
import torch.distributed as dist

from chapter19_9 import strategies
from chapter19_9.recorded import kept
from chapter19_9.train import train
from d2l_utils.device import rank_device
from d2l_utils.record import record
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=3, width=32, heads=2, length=16)


def recorded_steps(names, config, batch=12, options=None):
    """A recorded step of each strategy; "zero3+" is zero3 with prefetch."""
    return {
        name: train(
            name.removesuffix("+"),
            config,
            steps=3,
            batch=batch,
            lifecycle_step=2,
            options={"prefetch": True} if name.endswith("+") else options,
        ).lifecycle
        for name in names
    }


def same_numbers(names):
    """Largest difference of the weights after three steps, recorded with holdings and not; hooks left hanging."""
    found = {}
    for name in names:
        weights, left = [], 0
        module = strategies.get(name).load()
        for recorded in (False, True):
            model = module.shard(Transformer(CONFIG), rank_device())
            optimizer = module.optimizer(model, 1e-3)
            before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
            for step in range(3):
                text = sequences(CONFIG.length, 4, offset=4 * (step * dist.get_world_size() + dist.get_rank()))
                optimizer.zero_grad()
                further = lambda: kept(model, optimizer)  # noqa: E731, B023
                with record(model, optimizer, allocations=True, holdings=further, enabled=recorded):
                    model(text[:, :-1].contiguous(), text[:, 1:].contiguous()).backward()
                    optimizer.step()
            held = [getattr(p, "_local_tensor", p).detach().flatten() for p in model.parameters()]
            weights.append(torch.cat(held))
            left += sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) - before
        found[name] = ((weights[0] - weights[1]).abs().max().item(), left)
    return found
