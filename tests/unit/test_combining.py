"""What goes together, what does not and says so; element sizes; parts of a batch; saved bytes. No process is started."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from chapter19_9 import theory
from chapter19_9.checks import micro_batches
from chapter19_9.combining import PRECISIONS, Elements, check, elements
from chapter19_9.strategies import STRATEGIES, get
from d2l_utils.saved import SavedBytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_registry_says_how_a_strategy_computes_in_16_bits(name):
    assert ("dtype" in inspect.signature(get(name).load().shard).parameters) == (get(name).mixed != "autocast")
    for precision in PRECISIONS:
        check(name, precision=precision, accumulation=4)
    assert elements(name) == Elements()


def test_when_gradients_are_exchanged():
    windows = {name: strategy.window for name, strategy in STRATEGIES.items()}
    assert [name for name, window in windows.items() if window == "step"] == ["single", "zero1"]
    assert [name for name, window in windows.items() if window == "pass"] == ["zero2", "zero3"]
    for name, strategy in STRATEGIES.items():
        assert hasattr(strategy.load(), "accumulating") == (windows[name] == "either")


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        ("ddp", {"precision": "int8"}, "precision is 'int8': it must be one of fp32, bf16, fp16"),
        ("ddp", {"precision": None}, "precision is None: it must be one of"),
        ("zero9", {}, "strategy is 'zero9': it must be one of"),
        ("zero1", {"precision": "bf16", "options": ["dtype"]}, "precision is 'bf16' and options has 'dtype'"),
        ("zero1", {"sync_every": True}, "sync_every is True: strategy 'zero1' exchanges no gradients in backward"),
        ("zero2", {"sync_every": False, "accumulation": 2}, "sync_every is False: strategy 'zero2' reduces"),
        (
            "deepspeed2",
            {"precision": "bf16"},
            "precision is 'bf16': strategy 'deepspeed2' goes through .* in fp32 only",
        ),
        (
            "deepspeed2",
            {"sync_every": True},
            "sync_every is True: strategy 'deepspeed2' would begin its gradients anew",
        ),
        ("fsdp2", {"average": True}, "average is True: strategy 'fsdp2' averages gradients itself"),
    ],
)
def test_what_does_not_go_together_is_refused(strategy, arguments, message):
    with pytest.raises(ValueError, match=message):
        check(strategy, **arguments)


def test_what_makes_no_difference_is_allowed():
    check("zero2", sync_every=False)
    check("zero2", sync_every=True, accumulation=2)
    check("zero1", sync_every=False, accumulation=2)
    check("zero3", options=["dtype"])


def test_checking_needs_no_torch():
    code = "import sys, chapter19_9.combining as c; c.check('ddp', precision='bf16'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_element_sizes_by_hand():
    """20 trained numbers in a block, 2 in the root; 7 frozen in the root; two ranks."""
    model = [
        theory.Shape("a", (20,), True, "blocks.0"),
        theory.Shape("n", (2,), True, ""),
        theory.Shape("f", (7,), False, ""),
    ]
    states = {name: theory.exact_memory(name, model, 2, "bf16")[0] for name in ("ddp", "zero1", "zero2", "zero3")}
    assert states["ddp"] == theory.exact_memory("ddp", model, 2)[0]
    assert states["zero1"] == theory.States(2 * 29, 2 * 22, 8 * 11 + 4 * 11 + 2 * 4)
    assert states["zero2"] == theory.States(2 * 29, 2 * 11, 8 * 11 + 4 * 11 + 2 * 4)
    assert states["zero3"] == theory.States(4 * 15, 4 * 11, 8 * 11 + 2 * 4)
    assert theory.exact_memory("zero1", model, 2, "fp16")[0].gradients == 2 * 22 + 4 * 11
    assert theory.exact_memory("zero2", model, 2, "fp16")[0].gradients == 4 * 11
    # half of what is gathered (30: the frozen 7 padded to 8), and of what is reduced (22), goes to the other rank
    assert theory.exact_volume("zero3", model, 2, precision="bf16") == (2 * 30 + 22) * 2 / 2
    assert theory.exact_volume("fsdp2", model, 2, precision="bf16") == (2 * 30 * 2 + 22 * 4) / 2
    assert theory.exact_volume("fsdp2", model, 2, precision="fp16", clip=True) == (2 * 30 * 2 + 22 * 4) / 2 + 4 + 8
    assert theory.exact_volume("ddp", model, 2, 4, sync_every=True) == 4 * theory.exact_volume("ddp", model, 2, 4)
    zero1 = [theory.exact_volume("zero1", model, 2, 4, sync_every=each) for each in (True, False)]
    assert zero1[0] == zero1[1]


def test_parts_of_a_batch():
    assert micro_batches(12, 2, 3) == [[2, 2, 2]] * 2
    assert micro_batches(12, 3, 2, [3, 4, 5]) == [[2, 1], [2, 2], [3, 2]]
    for samples in ([3, 4], [3, 4, 6], [1, 5, 6]):
        with pytest.raises(ValueError, match=r"samples is .*: it must be 3 numbers, one a rank, each at least acc"):
            micro_batches(12, 3, 2, samples)


def test_saved_bytes_are_what_backward_needs_without_weights():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    x = torch.ones(5, 4)
    with SavedBytes(model) as saved:
        assert saved.bytes is None
        model(x[:1]).sum().backward()
        model(x).sum().backward()
        model(x[:2]).sum().backward()
    assert saved.bytes == 4 * (5 * 4 + 5 * 8)  # inputs of the two layers; ReLU keeps its output, which is the second
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    for rows in (x[:1], x, x[:2]):
        model(rows).sum().backward()
    assert torch.equal(model[0].weight.grad, gradient)
