"""What the ranks of test_combining run: many trainings in one launch, since a launch costs more than one of them."""

import time
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chapter19_9.precision import Mixed
from chapter19_9.strategies import get
from chapter19_9.train import train
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer

CPU = torch.device("cpu")


def grid(combos, config, **settings):
    """{strategy: [result of ``train`` for each of its arguments]} for {strategy: [arguments]}."""
    return {name: [train(name, config, **settings, **combo) for combo in many] for name, many in combos.items()}


def between_passes(names, windows, config, batch):
    """{strategy: [least memory from the second to the last pass's forward, in bytes, for each of the windows]}."""

    def pause(module, inputs):
        if isinstance(module, Transformer):
            time.sleep(0.02)  # gloo's threads let go of what they sent when they come to it

    def least(recording):
        starts = [e.start for e in recording.events if e.kind == "forward" and e.name == "blocks.0"]
        return min(point.bytes for point in recording.memory if starts[1] <= point.time <= starts[-1])

    handle = nn.modules.module.register_module_forward_pre_hook(pause)
    try:
        settings = {"steps": 3, "record_step": 2, "allocations": True, "batch": batch}
        results = grid(dict.fromkeys(names, windows), config, **settings)
    finally:
        handle.remove()
    return {name: [least(result.recording) for result in many] for name, many in results.items()}


def overflow(names):
    """{strategy: (weights stay, weights move in the next step, loss scale after each)} under fp16, when one element of
    the first gradient is infinite: where gradients are sharded, one rank has it and the other does not."""
    found = {}
    for name in names:
        module, mixed = get(name).load(), Mixed("fp16", get(name), CPU)
        model = module.shard(nn.Linear(4, 1, bias=False), CPU, **mixed.settings)
        optimizer = module.optimizer(model, 0.1)
        weights, scales = [_weights(module, model)], []
        for first in (float("inf"), 1.0):
            optimizer.zero_grad()
            x = torch.tensor([[first, 1.0, 1.0, 1.0]], dtype=mixed.settings.get("dtype"))
            with mixed.computing():
                loss = model(x).float().sum()
            mixed.scale(loss).backward()
            mixed.unscale(optimizer)
            mixed.step(optimizer)
            weights.append(_weights(module, model))
            scales.append(mixed.scaler.get_scale())
        found[name] = (torch.equal(*weights[:2]), not torch.equal(*weights[1:]), scales)
    return found


def _weights(module, model):
    if hasattr(module, "gathered"):
        return torch.cat([tensor.flatten().clone() for _, tensor in module.gathered(model)])
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def outside(name, config):
    """The error of one step with checkpointing around the blocks' calls, outside sharding's hooks; "" for none."""
    module = get(name).load()
    model = module.shard(Transformer(config), CPU)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Around(block)
    rows = sequences(config.length, 4)
    try:
        model(rows[:, :-1], rows[:, 1:]).backward()
    except RuntimeError as error:
        return str(error)
    return ""


class Around(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.called = partial(checkpoint, block, use_reentrant=False)

    def forward(self, x):
        return self.called(x)
