"""What the ranks of test_strategies run: many trainings in one launch, since a launch costs more than one of them."""

from chapter19_9.train import train


def train_all(strategies, configs, **settings):
    """{strategy: [result for each config]} of ``train`` with the same settings."""
    return {name: [train(name, config, **settings) for config in configs] for name in strategies}


def train_mutants(names, config, **settings):
    """{mutant: result of ``train``, or the error that it ended with} for code that was broken in one place each."""
    from tests.ranks.mutants import MUTANTS, NOTHING

    found = {}
    for name in names:
        strategy, options, broken = MUTANTS.get(name, NOTHING)
        with broken():
            try:
                found[name] = train(strategy, config, options=options, **settings)
            except RuntimeError as error:
                found[name] = str(error)
    return found


def fused(strategies):
    """{strategy: whether each group of its optimizer is trained by one fused operator}."""
    from chapter19_9.strategies import get
    from d2l_utils.device import rank_device
    from d2l_utils.transformer import Transformer, TransformerConfig

    found = {}
    for name in strategies:
        module = get(name).load()
        model = module.shard(Transformer(TransformerConfig(layers=1, width=16, heads=2, length=8)), rank_device())
        optimizer = module.optimizer(model, 1e-3)
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer, and of zero1 and zero2
        found[name] = [type(inner).__name__, *(group["fused"] for group in inner.param_groups)]
    return found
