"""What the ranks of test_deepspeed run: importing DeepSpeed costs more than a training, so all of them in one launch."""

import os
import sys

from chapter19_9.strategies import OPTIONAL
from chapter19_9.train import train


def trained(ways, common):
    """{(stage, way): result, or the ValueError that it ended with} of trainings; what they left in the process."""
    before, found = dict(os.environ), {}
    for stage in OPTIONAL:
        for way, settings in ways.items():
            try:
                found[stage, way] = train(stage, seed_by_rank=True, weights=True, **{**common, **settings})
            except ValueError as error:
                found[stage, way] = str(error)
    left = [name for name in sys.modules if name.startswith(("torch._inductor.compile_fx", "mpi4py"))]
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    return found | {"left": left, "changed": changed}
