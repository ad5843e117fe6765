"""Bytes that a rank holds: each live storage once, local and whole told apart, nothing assumed."""

import threading

import pytest
import torch
from torch import nn

from d2l_utils.memory import PeakMemory, Sizes, format_bytes, held
from d2l_utils.transformer import Transformer, TransformerConfig

SMALL = TransformerConfig(layers=2, width=16, heads=2, length=8)


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    model(x if x is not None else torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_each_part_of_a_trained_model():
    model = Transformer(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.zeros(1, 8, dtype=torch.long))
    count = SMALL.parameter_count
    tensors = len(list(model.parameters()))
    now = held(model, optimizer)
    assert (now.parameters, now.gradients, now.optimizer) == (4 * count, 4 * count, 8 * count + 4 * tensors)
    assert now.total == 16 * count + 4 * tensors
    assert now.needed == now.whole == Sizes(now.parameters, now.gradients, now.optimizer)
    assert str(now).splitlines()[0] == f"parameters {format_bytes(4 * count)}"


def test_what_does_not_exist_yet_is_not_zero():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    now = held(model, optimizer)
    assert (now.parameters, now.gradients, now.optimizer, now.total) == (80, None, None, 80)
    assert "gradients  not yet allocated" in str(now)
    assert "optimizer  not yet allocated" in str(now)
    step(model, optimizer)
    assert held(model, optimizer).gradients == 80
    optimizer.zero_grad(set_to_none=True)
    assert held(model, optimizer).gradients is None
    assert held(model).optimizer is None


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, [0, 0]), (0.9, [None, 80])])
def test_an_optimizer_without_states_holds_0_bytes(momentum, expected):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    before = held(model, optimizer).optimizer
    step(model, optimizer)
    assert [before, held(model, optimizer).optimizer] == expected


def test_states_of_a_wrapped_optimizer_count():
    model = nn.Linear(3, 5)
    outer = torch.optim.AdamW(model.parameters())
    outer.optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, outer.optim)
    assert held(model, outer).optimizer == 80


def test_M03_tied_weights_count_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert held(model).parameters == 96
    # two parameters over one storage, which parameters() cannot tell
    model["head"].weight = nn.Parameter(model["embedding"].weight.detach())
    assert len(list(model.parameters())) == 2
    now = held(model)
    assert (now.parameters, now.needed.parameters, now.whole.parameters) == (96, 96, 96)


def test_gradients_that_are_views_of_one_buffer_count_once():
    model = nn.Linear(3, 5)
    buffer = torch.zeros(32)
    model.weight.grad = buffer[:15].view(5, 3)
    model.bias.grad = buffer[15:20]
    now = held(model)
    assert (now.gradients, now.needed.gradients, now.whole.gradients) == (128, 80, 80)
    assert "gradients  128 B, 80 B of it needed" in str(now)


def test_bytes_that_two_tensors_cover_are_needed_once():
    model = nn.Linear(3, 5)
    buffer = torch.zeros(18)
    model.weight.grad = buffer[:15].view(5, 3)
    model.bias.grad = buffer[12:17]
    now = held(model)
    assert (now.gradients, now.needed.gradients, now.whole.gradients) == (72, 68, 68)


def test_a_storage_that_two_kinds_share_counts_once_in_the_total():
    model = nn.Linear(3, 5, bias=False)
    model.weight.grad = model.weight.detach()
    now = held(model)
    assert (now.parameters, now.gradients, now.total) == (60, 60, 60)


def test_freed_storages_count_0():
    model = nn.Linear(3, 5)
    model.weight.untyped_storage().resize_(0)
    now = held(model)
    assert (now.parameters, now.needed.parameters) == (20, 80)
    model.bias.untyped_storage().resize_(0)
    now = held(model)
    assert (now.parameters, now.needed.parameters) == (0, 80)
    assert str(now).splitlines()[0] == "parameters 0 B of 80 B needed (freed)"


def test_meta_tensors_hold_nothing():
    assert held(nn.Linear(3, 5, device="meta")).parameters == 0


@pytest.fixture
def pretended_rank():
    """Makes this process rank 2 of 3 in a process group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_M02_local_storage_and_whole_size_of_a_sharded_parameter_are_told_apart(pretended_rank):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (3,))
    model = fully_shard(nn.Linear(3, 5, bias=False), mesh=mesh)
    now = held(model)
    assert (now.parameters, now.needed.parameters, now.whole.parameters) == (24, 12, 60)
    assert str(now).splitlines()[0] == "parameters 24 B, 12 B of it needed, 60 B over all ranks"
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    now = held(model, optimizer)
    assert (now.needed.gradients, now.whole.gradients) == (12, 60)
    # exp_avg and exp_avg_sq of one row, and a step count of 4 bytes
    assert (now.needed.optimizer, now.whole.optimizer) == (28, 124)


def test_M05_each_peak_is_its_own_and_names_its_counter():
    with PeakMemory() as first:
        torch.empty(2**24, dtype=torch.uint8)
    with PeakMemory() as second:
        torch.empty(2**20, dtype=torch.uint8)
        torch.empty(2**20, dtype=torch.uint8)
    assert (first.bytes, second.bytes) == (2**24, 2**20)
    assert "torch.profiler" in first.counter
    assert str(first).startswith("peak 16.78 MB above the start (CPU allocations seen by torch.profiler")


def test_M06_a_peak_counts_what_is_alive_at_once():
    with PeakMemory("cpu") as peak:
        kept = torch.zeros(64 * 2**20, dtype=torch.uint8)
        both = torch.zeros(2**20, dtype=torch.uint8)
        del both
        torch.zeros(2**10, dtype=torch.uint8)
    assert peak.bytes == 65 * 2**20
    assert kept.untyped_storage().nbytes() == 64 * 2**20


def test_a_peak_does_not_depend_on_what_was_measured_before():
    with PeakMemory():
        kept = torch.zeros(2**20, dtype=torch.uint8)
    with PeakMemory() as peak:
        del kept
        torch.zeros(2**10, dtype=torch.uint8)
    assert peak.bytes == 2**10


def test_a_peak_says_that_it_does_not_see_other_threads():  # X23
    kept = []
    with PeakMemory("cpu") as peak:
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(2**20)))
        thread.start()
        thread.join()
    assert peak.bytes in (0, 2**22)
    if not peak.bytes:
        assert "it does not see other threads" in str(peak)


@pytest.mark.parametrize("rank", [{}, {"D2L_DEVICE_TYPE": "cuda", "LOCAL_RANK": "1"}, {"D2L_DEVICE_TYPE": "cpu"}])
def test_a_peak_is_that_of_the_ranks_own_device(rank, monkeypatch):  # W8
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # as an AdamW step on the CPU may make it
    for name in ("D2L_DEVICE_TYPE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    expected = torch.device("cuda", 1) if rank.get("D2L_DEVICE_TYPE") == "cuda" else torch.device("cpu")
    assert PeakMemory().device == expected


def test_an_error_in_the_block_comes_through_and_the_next_peak_works():
    with pytest.raises(KeyError), PeakMemory():
        raise KeyError("x")
    with PeakMemory() as peak:
        torch.empty(1000, dtype=torch.uint8)
    assert peak.bytes == 1000


def test_an_unmeasured_peak_says_so_and_nothing_touches_an_accelerator():
    peak = PeakMemory()
    assert "not measured yet" in str(peak)
    assert peak.device.type == "cpu"
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("count", "binary", "text"),
    [
        (None, False, "not yet allocated"),
        (0, False, "0 B"),
        (999, False, "999 B"),
        (24_670_000, False, "24.67 MB"),
        (24_670_000, True, "23.53 MiB"),
        (1023, True, "1023 B"),
        (1024, True, "1.00 KiB"),
        (120 * 10**9, False, "120.00 GB"),
        (5 * 10**15, False, "5000.00 TB"),
        (-2_000_000, False, "-2.00 MB"),
    ],
)
def test_bytes_for_a_reader_say_their_unit(count, binary, text):
    assert format_bytes(count, binary) == text
