"""What the ranks of test_advisor run: many trainings in one launch, since a launch costs more than one of them."""

import runpy

import torch

from chapter19_9.train import train
from d2l_utils.device import rank_device
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig


def costs(strategies, configs, batch):
    """{strategy: for each config (states held, peak, bytes sent)} of one recorded step."""
    found = {}
    for name in strategies:
        found[name] = []
        for config in configs:
            # the third step: in its second, DDP lays its buckets anew
            result = train(name, config, steps=3, batch=batch, record_step=2, allocations=True)
            held = [result.held.parameters, result.held.gradients, result.held.optimizer]
            sent = sum(event.sent_bytes for event in result.recording.events if event.kind == "collective")
            found[name].append((held, result.peak, sent))
    return found


def losses(files, steps, batch):
    """{name: this rank's losses} of programs whose lines are in files: each gets a model and defines ``step``."""
    import torch.distributed as dist

    config, found = TransformerConfig(layers=2, width=32, length=32), {}
    rank, n = dist.get_rank(), dist.get_world_size()
    for name, path in files.items():
        program = runpy.run_path(path, {"torch": torch, "model": Transformer(config), "device": rank_device()})
        rows = sequences(config.length, batch).chunk(n)[rank].to(rank_device())
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        found[name] = [program["step"](tokens, targets).item() for _ in range(steps)]
    return found
