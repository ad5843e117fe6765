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
