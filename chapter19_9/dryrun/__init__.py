"""A dry run: one training step of a strategy's own code on one of N pretended ranks, with tensors that have no data.

    found = dry_run(Plan("llama-65b", "fsdp2", world_size=1024))
    print(found)

FSDP2 and hand-written ZeRO are asked to do a real step. The process group is torch's "fake" one: it launches
collectives to nobody. The tensors are torch's fake ones: shapes, types and memory that is counted and never touched. So
what a rank stores and when it communicates is not predicted by a formula but done by the code, far past what this
machine could hold; only what it computes is left out. In a terminal: ``python -m chapter19_9.dryrun --help``.

Importing this needs no torch. What a dry run counts, and what it cannot know, is in ``outcome``.
"""

from chapter19_9.dryrun.outcome import Collective, DryRun, Moment
from chapter19_9.dryrun.plan import Plan
from chapter19_9.dryrun.process import dry_run

__all__ = ["Collective", "DryRun", "Moment", "Plan", "dry_run"]
