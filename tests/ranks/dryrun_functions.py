"""What the ranks of test_dryrun run: trainings whose collectives are the backend's own, as those of a dry run are."""

from collections import Counter

from chapter19_9.train import train


def steps(cases, batch):
    """For each (strategy, config, settings): (states held, peak, {(collective, bytes): count}) of the third step."""
    found = []
    for strategy, config, settings in cases:
        if strategy.startswith("zero"):  # on gloo they would send from rank to rank
            settings = {**settings, "options": {"reduce_scatter": "backend"}}
        result = train(strategy, config, steps=3, batch=batch, record_step=2, allocations=True, **settings)
        held = [result.held.parameters, result.held.gradients, result.held.optimizer]
        sent = Counter((e.name, e.bytes) for e in result.recording.events if e.kind == "collective")
        found.append((held, result.peak, [[*what, count] for what, count in sent.items()]))
    return found


def dry_steps(cases, n, batch):
    """{rank: the same} of the first and the last of n pretended ranks, one after the other in one process."""
    import torch.distributed as dist

    from chapter19_9.dryrun.plan import Plan
    from chapter19_9.dryrun.step import pretend

    dist.destroy_process_group()  # a pretended one takes its place
    found = []
    for strategy, config, settings in cases:
        ranks = {}
        for rank in (0, n - 1):
            settings = {"precision": "fp32", **settings}
            plan = Plan(config, strategy, n, rank, micro_batch=batch // n, **settings)
            _, rest, curve, collectives = pretend(plan, lambda *_: None)
            sent = Counter()
            for one in collectives:
                sent[one.name, one.bytes] += one.count
            held = [rest.parameters, rest.gradients, rest.optimizer]
            peak = max(moment.total for moment in curve)
            ranks[str(rank)] = held, peak, [[*what, count] for what, count in sent.items()]
        found.append(ranks)
    return found
