"""Combinations of precision, checkpointing, accumulation and clipping, for every strategy on real ranks: each against
its plain twin, and what it holds and sends against the formulas, to the byte.

Tolerances, relative to float32 on one process: losses and gradient norms. bf16 has 8 significant bits, fp16 has 11.
"""

from collections import Counter
from functools import cache

import pytest

from chapter19_9 import theory
from chapter19_9.passes import gradients_by_pass
from chapter19_9.strategies import STRATEGIES, get
from d2l_utils import LaunchError, launch
from d2l_utils.agree import relative_difference
from d2l_utils.transformer import TransformerConfig
from tests.ranks import combining_functions as ranks

# nothing divides; one weight in two places; one that is not trained
CONFIG = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
STEPS, BATCH = 3, 12
TOLERANCES = {"fp32": (1e-5, 1e-5), "fp16": (1e-4, 1e-3), "bf16": (1e-3, 1e-2)}

PLAIN = {}
COMBINATIONS = {
    "plain": PLAIN,
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": True},
    "all": {"precision": "bf16", "checkpointing": True, "accumulation": 3, "clip": 0.25},
    "all fp16": {"precision": "fp16", "checkpointing": True, "accumulation": 3, "clip": 0.25},
}
NAMES = [name for name in STRATEGIES if name not in ("single", "fsdp2_root_only")]
WAITING = [name for name in NAMES if get(name).window == "either"]
WINDOW = {"accumulation": 4, "sync_every": False}, {"accumulation": 4, "sync_every": True}


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=200, **arguments).results


@cache
def measured():
    """All combinations of all strategies on 2 ranks, then the two ways to accumulate: {(strategy, name): ranks}."""
    names = [*COMBINATIONS, "waiting", "each"]
    combos = {name: [*COMBINATIONS.values(), *(WINDOW if name in WAITING else ())] for name in NAMES}
    settings = {"steps": STEPS, "record_step": STEPS - 1, "allocations": True}
    results = run(ranks.grid, 2, combos=combos, config=CONFIG, batch=BATCH * 2, **settings)
    return {
        (strategy, name): [result[strategy][i] for result in results]
        for strategy in NAMES
        for i, name in enumerate(names[: len(combos[strategy])])
    }


@cache
def one_process(batch, **arguments):
    combos = {"single": [{**PLAIN, **arguments}]}
    return run(ranks.grid, 1, combos=combos, config=CONFIG, steps=STEPS, batch=batch, weights=True)[0]["single"][0]


def collectives(result):
    return [event for event in result.recording.events if event.kind == "collective"]


def test_every_combination_was_run_under_every_strategy():
    assert len(measured()) == len(NAMES) * len(COMBINATIONS) + 2 * len(WAITING)
    assert WAITING == ["ddp", "zero_redundancy", "fsdp1", "fsdp1_grad_op", "fsdp2", "fsdp2_no_reshard"]


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_trains_like_its_plain_twin(name, strategy):
    of_losses, of_norms = TOLERANCES[COMBINATIONS[name].get("precision", "fp32")]
    plain = one_process(BATCH * 2, clip=COMBINATIONS[name].get("clip"))
    for result in measured()[strategy, name]:
        assert result.losses == pytest.approx(plain.losses, rel=of_losses)
        assert result.gradient_norms == pytest.approx(plain.gradient_norms, rel=of_norms)
        assert result.agree
        assert result.changed
    # and 16 bits are 16 bits
    exact = result.losses == pytest.approx(plain.losses, rel=4e-7)
    assert exact == ("precision" not in COMBINATIONS[name])


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_it_holds_and_sends_what_the_formulas_say(name, strategy):
    arguments, shapes = COMBINATIONS[name], theory.shapes(CONFIG)
    precision, passes = arguments.get("precision", "fp32"), arguments.get("accumulation", 1)
    results = measured()[strategy, name]
    held = [(r.held.parameters, r.held.gradients, r.held.optimizer or 0) for r in results]
    formula = theory.exact_memory(strategy, shapes, 2, precision)
    assert held == [(e.parameters, e.gradients, e.optimizer) for e in formula]
    sent = sum(event.sent_bytes for result in results for event in collectives(result)) / 2
    assert sent == theory.exact_volume(strategy, shapes, 2, passes, precision=precision, clip="clip" in arguments)


@pytest.mark.parametrize("strategy", NAMES)
def test_what_attacks_activations_and_what_does_not(strategy):
    saved = {name: measured()[strategy, name][0].saved for name in COMBINATIONS}
    peak = {name: measured()[strategy, name][0].peak for name in COMBINATIONS}
    assert saved["checkpointing"] < 0.5 * saved["plain"]
    assert saved["bf16"] < 0.85 * saved["plain"]
    assert saved["all"] == saved["all fp16"] < 0.5 * saved["checkpointing"]
    assert peak["all"] < peak["checkpointing"] < peak["plain"]
    assert peak["bf16"] < peak["plain"]
    # sharding shrinks none of it. FSDP1 keeps the positions' indices as well: its frozen weights are in a trained vector
    extra = 8 * CONFIG.length if strategy.startswith("fsdp1") else 0
    assert saved["plain"] == measured()["ddp", "plain"][0].saved + extra


@pytest.mark.parametrize("strategy", NAMES)
def test_checkpointing_sends_nothing_more(strategy):
    plain, again = (
        Counter(e.name for e in collectives(measured()[strategy, n][0])) for n in ("plain", "checkpointing")
    )
    assert plain == again


@pytest.mark.parametrize("strategy", WAITING)
def test_gradients_wait_for_the_last_backward_or_go_with_each(strategy):
    shapes, exchanged = theory.shapes(CONFIG), {}
    for name, each in (("waiting", False), ("each", True)):
        results = measured()[strategy, name]
        assert results[0].losses == pytest.approx(one_process(BATCH * 2).losses, rel=1e-5)
        assert results[0].gradient_norms == pytest.approx(one_process(BATCH * 2).gradient_norms, rel=1e-5)
        events = [event for result in results for event in collectives(result)]
        sent = sum(event.sent_bytes for event in events) / 2
        assert sent == theory.exact_volume(strategy, shapes, 2, 4, sync_every=each)
        exchanged[name] = sum(event.bytes for event in events if event.name in ("all_reduce", "reduce_scatter"))
    assert exchanged["each"] == 4 * exchanged["waiting"] > 0


def test_gradients_held_between_passes_are_whole_where_they_wait():
    config = TransformerConfig(layers=2, width=32, heads=2, length=4)  # everything divides
    whole = theory.adamw_states(config).gradients
    settings = {"config": config, "batch": 8, "steps": 2, "lifecycle_step": 1}
    for rank in run(ranks.grid, 2, combos=dict.fromkeys(WAITING, WINDOW), **settings):
        for name in WAITING:
            for result, exchanged in zip(rank[name], (False, True), strict=True):
                held = gradients_by_pass(result.lifecycle)
                after = [held[max(x for x in held if x <= done)] for done in range(5)]
                part, last = (whole // 2 if "fsdp" in name and sharded else whole for sharded in (exchanged, True))
                assert after == [0, part, part, part, last], (name, exchanged)


def test_what_waits_is_whole():
    """Memory between two passes of the window, above the start of the step, in units of M_G."""
    config = TransformerConfig(layers=2, width=32, heads=2, length=4)
    whole = theory.adamw_states(config).gradients
    # DDP has its buckets in any case, and beside them what waits; fsdp1_grad_op keeps the weights as well
    expected = {name: {"fsdp1_grad_op": (2, 0.5)}.get(name, (1, 0.5 if "fsdp" in name else 0)) for name in WAITING}
    least = dict.fromkeys(WAITING, (float("inf"), float("inf")))
    for _ in range(8):  # gloo's threads let go of tensors when they come to it: that can only add, so the least counts
        found = run(ranks.between_passes, 2, names=WAITING, windows=WINDOW, config=config, batch=8)
        for name in WAITING:
            seen = (min(result[name][i] for result in found) / whole for i in range(2))
            least[name] = tuple(map(min, least[name], seen))
        if all(a <= b + 0.35 for name in WAITING for a, b in zip(least[name], expected[name], strict=True)):
            break
    for name in WAITING:
        for seen, held in zip(least[name], expected[name], strict=True):
            assert held - 0.02 <= seen <= held + 0.35, (name, least[name])


@pytest.fixture(scope="module")
def unequal():
    """{strategy: [results with whole parts, with uneven accumulation]} for ranks with 1, 3, 8 and 3, 4, 5 samples."""
    combos = [{"samples": [1, 3, 8]}, {"samples": [3, 4, 5], "accumulation": 2}]
    asked = dict.fromkeys(NAMES, combos) | {"single": [{**combo, "average": True} for combo in combos]}
    return run(ranks.grid, 3, combos=asked, config=CONFIG, steps=STEPS, batch=BATCH, weights=True)


@pytest.mark.parametrize("strategy", ["single", *NAMES])
def test_ranks_with_unequal_numbers_of_samples_are_one_process_over_the_same_samples(unequal, strategy):
    plain = one_process(BATCH)
    for case in range(2):
        many = [result[strategy][case] for result in unequal]
        for result in many:
            assert result.losses == pytest.approx(plain.losses, rel=1e-5)
            assert result.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-5)
            assert relative_difference(result.gradients, plain.gradients) < 1e-5
            assert relative_difference(result.weights, plain.weights) < 1e-5
            assert result.agree
        local = [result.local_losses[0] for result in many]
        assert abs(sum(local) / 3 - plain.losses[0]) > 1e-4  # the mean of the ranks' means is another number


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all():
    for result in run(ranks.overflow, 2, names=NAMES):
        assert result == dict.fromkeys(NAMES, (True, True, [512.0, 512.0]))


def test_checkpointing_around_zero3s_hooks_frees_what_backward_needs():
    inside = measured()["zero3", "checkpointing"][0]
    assert inside.agree
    for error in run(ranks.outside, 2, name="zero3", config=CONFIG):
        assert "storage of size 0" in error
    assert run(ranks.outside, 2, name="fsdp2", config=CONFIG) == ["", ""]


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        ("ddp", {"samples": [3, 3]}, "samples is [3, 3]: it must be 2 numbers, one a rank, each at least accumulation"),
        ("fsdp2", {"precision": "fp8"}, "precision is 'fp8': it must be one of fp32, bf16, fp16"),
    ],
)
def test_what_does_not_go_together_is_refused_in_the_ranks_too(strategy, arguments, message):
    with pytest.raises(LaunchError, match="ValueError") as caught:
        run(ranks.grid, 2, combos={strategy: [arguments]}, config=CONFIG, steps=1, batch=8)
    assert message in str(caught.value)
