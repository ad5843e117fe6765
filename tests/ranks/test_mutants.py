"""The suite's own check fails on each hand-written strategy that was broken in one place, and for the right reason."""

import pytest

from d2l_utils.transformer import TransformerConfig
from tests.ranks import strategy_functions, zero_functions
from tests.ranks.mutants import MUTANTS
from tests.ranks.test_strategies import differs, reference, run

# 3 ranks: all flat vectors but the frozen one have padding
CONFIG = TransformerConfig(layers=1, width=18, heads=3, length=7, tied=True, frozen=True)
SETTINGS = {"steps": 2, "batch": 6, "clip": 0.25}
# What each kind must be seen by, at least; "error" is one that torch raises.
SEEN = {
    "without a sum": {"losses", "norms", "gradients", "weights"},
    "sum instead of mean": {"norms"},
    "wrong owner": {"losses", "norms", "gradients", "weights"},
    "padding trained": {"norms", "weights"},
    "new weights not gathered": {"losses", "agree"},
    "others' shards": {"losses", "agree"},
    "regather skipped": {"error"},
    "never freed": {"losses"},
    "tied weight sharded twice": {"losses", "names", "weights"},
    "not broadcast": {"losses", "weights"},
    "earlier passes": {"norms", "gradients", "weights"},
    "norm of a part": {"norms", "weights"},
}


@pytest.fixture(scope="module")
def found():
    """{mutant: what differs from one process on the whole batch, on any rank}."""
    results = run(
        strategy_functions.train_mutants, 3, names=["", *MUTANTS], config=CONFIG,
        seed_by_rank=True, weights=True, accumulation=2, **SETTINGS,
    )  # fmt: skip
    kinds = {name: set() for name in ["", *MUTANTS]}
    for result in results:
        for name, outcome in result.items():
            wrong = ["error"] if isinstance(outcome, str) else differs(outcome, reference(CONFIG, **SETTINGS))
            kinds[name].update(wrong)
    return kinds


def test_unbroken_code_passes_the_same_check(found):
    assert found[""] == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_fails_on(found, name):
    (kind,) = [kind for kind in SEEN if kind in name]
    assert SEEN[kind] <= found[name]


def test_a_shard_that_is_stale_after_loading_is_seen():
    for found in run(zero_functions.reloaded, 2, dtype="bfloat16", stale=True):
        loaded, stepped = found["plain"]
        # zero1 and zero2 compute with what was loaded until the optimizer brings back the old masters
        for name in ("zero1", "zero2"):
            assert found[name][0] == pytest.approx(loaded, rel=2e-2)
            assert found[name][1] != pytest.approx(stepped, rel=2e-2)
        assert found["zero3"][0] != pytest.approx(loaded, rel=2e-2)
