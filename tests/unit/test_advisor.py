"""Presets against their published counts, every branch of the flow, what-ifs, errors, and the ZeRO paper's figures."""

from dataclasses import replace

import pytest
import torch

from chapter19_9 import theory
from chapter19_9.choosing import cost, view
from chapter19_9.choosing.advisor import ASSUMPTIONS, Question, advise, candidates, main, weigh
from chapter19_9.choosing.cost import BF16, FP32, HABITS, PARTS
from chapter19_9.choosing.lines import SHORT, write
from chapter19_9.choosing.machines import Machines
from chapter19_9.choosing.presets import PRESETS, Model, of_toy, own
from chapter19_9.choosing.scaling import Setup, assumptions, predict
from chapter19_9.choosing.what_if import fewest_ranks, largest, memory_for
from chapter19_9.strategies import STRATEGIES
from d2l_utils.figure import png
from d2l_utils.record import record
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

SMALL = own(layers=4, width=512, heads=8, vocabulary=1000, length=512)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    model = PRESETS[name]
    assert model.parameters == pytest.approx(model.published, rel=0.011)
    assert model.source


def test_the_presets_reach_from_100_million_to_a_trillion():
    counts = [model.parameters for model in PRESETS.values()]
    assert len(counts) >= 8
    assert counts == sorted(counts)
    assert 1e8 < counts[0] < 2e8 and counts[-1] > 1e12
    assert PRESETS["gpt2"].parameters == 124_439_808  # the model card's file holds exactly these
    assert PRESETS["llama-7b"].parameters == 6_738_415_616


@pytest.mark.parametrize("tied", [False, True])
def test_the_toy_is_counted_like_the_others(tied):
    config = TransformerConfig(layers=3, width=24, heads=3, length=10, tied=tied)
    assert of_toy(config).parameters == sum(p.numel() for p in Transformer(config).parameters())


def test_states_of_7_5_billion_are_the_zero_papers():
    """arXiv 1910.02054, figure 1 and table 1: GB at N = 64, plain and stages 1 to 3."""
    states = BF16.states(7.5e9)
    totals = [theory.memory(name, states, 64).total / 1e9 for name in ("ddp", "zero1", "zero2", "zero3")]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    model = replace(PRESETS["megatron-7.5b"], layers=36)
    at_rest = cost.moments("fsdp2", model, 64, 1, BF16)[-1]
    assert at_rest.parameters + at_rest.gradients + at_rest.optimizer == pytest.approx(16 * model.parameters / 64)


def test_saved_activations_are_the_papers_less_dropout_and_plain_attention():
    """arXiv 2205.05198: s b h (34 + 5 a s / h) bytes a layer; 2 of 34 are masks, the second term s x s matrices."""
    model = PRESETS["gpt3-175b"]
    tokens = 2048
    small = 4 * tokens * (4 + model.heads)
    assert cost.saved_by_block(model, tokens, 2) - small == 32 * tokens * model.width


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [16, 64])
def test_the_peak_of_one_process_is_as_recorded(checkpointing, length):
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    config = TransformerConfig(layers=4, width=64, length=length)
    model = Transformer(config)
    if checkpointing:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = sequences(length, 4)
    for step in range(2):
        optimizer.zero_grad()
        with record(model, optimizer, allocations=True, enabled=step == 1) as recording:
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
    rest = theory.exact_memory("single", theory.shapes(config), 1)[0]
    walked = cost.moments("single", of_toy(config), 1, 4 * length, checkpointing=checkpointing, states=rest, gloo=True)
    most = cost.peak(walked)
    assert most.total - rest.parameters - rest.optimizer == pytest.approx(recording.peak, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_leaving_out_the_middle_blocks_leaves_the_peak(strategy, checkpointing):
    for model in (PRESETS["gpt2"], SMALL, replace(SMALL, layers=1), replace(SMALL, layers=2)):
        for tokens in (8, 4096):
            given = {"strategy": strategy, "model": model, "n": 4, "tokens": tokens, "checkpointing": checkpointing}
            assert cost.peak(cost.moments(**given)) == cost.peak(cost.moments(**given, every=False))


def test_every_registered_strategy_has_its_habits_and_no_part_is_below_zero():
    assert HABITS.keys() == STRATEGIES.keys()
    for name in STRATEGIES:
        for moment in cost.moments(name, SMALL, 2, 512, BF16):
            assert min(getattr(moment, part) for part in PARTS) >= -1e-3, moment


def ask(**changes):
    return advise(Question(**{"model": SMALL, "precision": "fp32", "devices": 8, "reserve": 0.0, **changes}))


def between(question, strategy, other, checkpointing=False):
    """GB on which one way fits and another does not."""
    need, more = (weigh(question, name, checkpointing).peak.total for name in (strategy, other))
    assert need < more
    return (need + more) / 2e9


@pytest.mark.parametrize(
    ("strategy", "other"),
    [("zero_redundancy", "ddp"), ("fsdp2_no_reshard", "zero_redundancy"), ("fsdp2", "fsdp2_no_reshard")],
)
def test_the_flow_takes_the_first_that_fits(strategy, other):
    question = Question(SMALL, precision="fp32")
    answer = ask(memory=between(question, strategy, other))
    assert answer.strategy == strategy
    assert [option.strategy for option in answer.asked] == candidates(question)[: len(answer.asked)]
    assert not answer.chosen.checkpointing
    assert answer.next is None
    assert ask(memory=1000.0).strategy == "ddp"


def test_where_activations_are_in_the_way_checkpointing_comes_before_sharding_again():
    question = Question(SMALL, precision="fp32", micro_batch=16, length=512)
    lightest, with_ = weigh(question, "fsdp2", False).peak.total, weigh(question, "ddp", True).peak.total
    assert with_ < lightest
    answer = ask(micro_batch=16, length=512, memory=(with_ + lightest) / 2e9)
    assert (answer.strategy, answer.chosen.checkpointing) == ("ddp", True)
    assert len(answer.asked) == 5
    alone = ask(micro_batch=16, length=512, memory=(with_ + lightest) / 2e9, checkpointing=True)
    assert (alone.strategy, len(alone.options)) == ("ddp", 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": "megatron-1t", "precision": "bf16", "nodes": 128, "memory": 80.0, "reserve": 0.1},
            "tensor parallel",
        ),
        ({"model": "llama-7b", "length": 2**20, "memory": 8.0}, "sequence or context parallel"),
        ({"model": "gpt3-175b", "precision": "bf16", "memory": 80.0}, "more devices to shard over"),
        ({"micro_batch": 512, "memory": 1.0}, "a micro-batch of "),
        ({"model": "llama-7b", "devices": 1, "precision": "bf16", "memory": 80.0}, "more devices: with FSDP2"),
    ],
)
def test_when_nothing_fits_it_says_what_to_look_at(changes, words):
    answer = ask(**changes)
    assert answer.chosen is None and answer.strategy is None and answer.lines == ""
    assert answer.next.startswith(words)
    assert "Nothing fits. Next: " + words in str(answer)


def test_one_rank_has_nothing_to_share():
    answer = ask(devices=1, memory=10.0)
    assert answer.strategy == "single"
    assert answer.chosen.sent == 0


def test_what_would_change_it_really_changes_it():
    question = Question("llama-7b", memory=40.0)
    answer = advise(question)
    name, lane = answer.strategy, answer.chosen.checkpointing
    n = fewest_ranks(question, name, lane)
    assert weigh(replace(question, devices=n), name, lane).fits
    assert n > 2 and not weigh(replace(question, devices=n - 1), name, lane).fits
    for field in ("micro_batch", "length"):
        most = largest(question, field, name, lane)
        assert weigh(replace(question, **{field: most}), name, lane).fits
        assert not weigh(replace(question, **{field: most + 1}), name, lane).fits
    ddp = answer.options[0]
    assert not ddp.fits
    for gb, fits in ((memory_for(question, ddp), True), (memory_for(question, ddp) - 1, False)):
        assert weigh(replace(question, memory=float(gb)), "ddp", False).fits == fits
    assert fewest_ranks(question, "fsdp2_no_reshard", False) is not None
    assert fewest_ranks(replace(question, memory=10.0), "zero1", False) is None, "P and G stay whole"
    assert any(f"from {n} ranks on" in change for change in answer.changes)


def test_a_sample_is_no_longer_than_the_positions_that_were_learned():
    answer = advise(Question("gpt2"))
    assert f"{answer.chosen.title}: length up to 1,024, the positions that it has learned" in answer.changes
    rotary = advise(Question("llama-7b", length=2**15, nodes=2))
    assert not any("positions" in change for change in rotary.changes)


def test_bytes_and_time_on_the_link_are_those_of_scaling():
    question = Question("llama-7b", precision="fp32", devices=8, nodes=2, inside=300.0, between=25.0, memory=1000.0)
    m_p = 4 * PRESETS["llama-7b"].parameters
    for name, units in (("ddp", 2), ("fsdp2_no_reshard", 2), ("fsdp2", 3), ("zero_redundancy", 3)):
        option = weigh(question, name, False)
        assert option.sent == pytest.approx(units * 15 / 16 * m_p)
        assert option.time.sending == pytest.approx(option.sent / 25e9)
        setup = Setup("llama-7b", name, 16, precision="fp32", machines=Machines(inside=300.0, between=25.0))
        assert option.time == replace(predict(setup), setup=option.setup)
    assert weigh(replace(question, nodes=1), "ddp", False).time.sending == pytest.approx(2 * 7 / 8 * m_p / 300e9)
    assert weigh(replace(question, inside=5.0), "ddp", False).time.sending == pytest.approx(2 * 15 / 16 * m_p / 5e9)
    faster = weigh(replace(question, teraflops=800.0), "ddp", False).time.computing
    assert faster == pytest.approx(weigh(question, "ddp", False).time.computing / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt9"}, "model is 'gpt9': it must be one of gpt2"),
        ({"model": 3}, "model is 3: it must be one of gpt2"),
        ({"length": -1}, "length is -1: it must be a whole number of at least 0"),
        ({"model": "gpt2", "length": 1025}, "length is 1025: it must be at most 1024, the positions"),
        ({"micro_batch": 0}, "micro_batch is 0: it must be a whole number of at least 1"),
        ({"micro_batch": 1.5}, "micro_batch is 1.5"),
        ({"devices": True}, "devices is True"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 2**20}, "nodes is 1048576: with 8 devices each, at most"),
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of fp32, bf16"),
        ({"checkpointing": 1}, "checkpointing is 1: it must be True or False"),
        ({"memory": 0}, "memory is 0: it must be a number above 0"),
        ({"memory": float("nan")}, "memory is nan: it must be a number above 0"),
        ({"inside": float("inf")}, "inside is inf"),
        ({"between": "fast"}, "between is 'fast'"),
        ({"teraflops": 0}, "teraflops is 0: it must be a number above 0"),
        ({"reserve": 1}, "reserve is 1: it must be a number from 0 to below 1"),
    ],
)
def test_nonsense_is_refused_by_the_fields_name(changes, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        Question(**changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 7}, "heads is 7: it must divide width, which is 512"),
        ({"layers": 0}, "layers is 0: it must be a whole number of at least 1"),
        ({"kv_heads": 3}, "kv_heads is 3: it must divide heads, which is 8"),
        ({"depth": 3}, "depth: a model has no such size; allowed: gated"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        own(**{"layers": 4, "width": 512, "heads": 8, "vocabulary": 1000, "length": 512, **sizes})


def test_there_are_lines_for_every_way_that_can_be_chosen():
    for precision in (FP32, BF16):
        for ranks in (1, 2):
            for name in candidates(Question(precision=precision.name, devices=ranks)):
                assert name in SHORT
                text = write(name, precision.name, checkpointing=True)
                compile(text, name, "exec")
                assert "checkpoint(" in text.replace("partial(checkpoint, ", "checkpoint(")
    with pytest.raises(ValueError, match="strategy is 'zero9': there are lines for single, ddp"):
        write("zero9", "fp32", False)


def test_the_command_prints_the_answer_and_names_what_it_refuses(capsys):
    main(["--model", "llama3-8b", "--nodes", "2"])
    printed = capsys.readouterr().out
    assert "8.03 billion parameters [Llama 3 (arXiv 2407.21783), table 3]" in printed
    assert printed.count("->") == 1
    for words in (*ASSUMPTIONS, *assumptions(Setup("llama3-8b", ranks=16))):
        assert words in printed
    main(["--layers", "2", "--width", "64", "--heads", "4", "--vocabulary", "256", "--length", "64"])
    assert "Start with DDP (ddp)" in capsys.readouterr().out
    for arguments, message in (
        (["--memory", "-1"], "memory is -1.0: it must be a number above 0"),
        (["--layers", "2"], "width is missing: own sizes go together"),
        (["--model", "x"], "model is 'x'"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"memory": 1000.0}, {"model": "megatron-1t"}, {"devices": 1, "memory": 10.0}])
def test_pictures_of_every_kind_of_answer(changes):
    answer = ask(**changes)
    for figure in (view.flow_of(answer), view.bars_of(answer)):
        assert png(figure, 50)[:4] == b"\x89PNG"
    flow, bars = view.flow_of(answer), view.bars_of(answer)
    words = [text.get_text() for text in flow.axes[0].texts]
    taken = [text for text in words if text.startswith("✓")]
    assert len(taken) == (1 if answer.chosen else 0)
    assert sum(text.startswith("✗") for text in words) == sum(not option.fits for option in answer.asked)
    marked = [label.get_text() for label in bars.axes[0].get_yticklabels() if label.get_text().startswith("▸")]
    assert marked == ([f"▸ {answer.chosen.title}"] if answer.chosen else [])


def test_a_model_is_named_by_what_it_is():
    assert isinstance(Question("gpt2").sizes, Model)
    assert Question(SMALL).sizes is SMALL
    assert Question("gpt2", length=100, micro_batch=3).tokens == 300
    assert Question("gpt2").tokens == 1024
