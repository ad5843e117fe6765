"""What the ranks of test_strategies run: many trainings in one launch, since a launch costs more than one of them."""

import contextlib

from chapter19_9.train import train


def train_all(strategies, configs, **settings):
    """{strategy: [result for each config]} of ``train`` with the same settings."""
    return {name: [train(name, config, **settings) for config in configs] for name in strategies}


def mutated(mutant, strategy, config, load=False, **settings):
    """``train`` of a strategy whose code was broken in one place, by the name of the mutant."""
    from tests.ranks import mutants

    with contextlib.ExitStack() as stack:
        mutants.MUTANTS[mutant](stack)
        return train(strategy, config, **settings)
