"""Bytes that a rank holds: each live storage once, local and whole told apart, nothing assumed."""

import importlib
import threading

import pytest
import torch
import torch.distributed.fsdp
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


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_a_sparse_tensor_holds_its_indices_and_values(layout):
    made = torch.eye(4)
    sparse = {
        "coo": made.to_sparse, "csr": made.to_sparse_csr, "csc": made.to_sparse_csc, "bsr": lambda: made.to_sparse_bsr((2, 2))
    }[layout]()  # fmt: skip
    expected = {"coo": 2 * 4 * 8 + 16, "csr": 5 * 8 + 4 * 8 + 16, "csc": 5 * 8 + 4 * 8 + 16, "bsr": 3 * 8 + 2 * 8 + 32}
    now = held(nn.Module(), parameters=[sparse])
    assert now.needed.parameters == now.whole.parameters == expected[layout]
    assert now.parameters >= expected[layout]  # PyTorch makes some indices as views of larger memory


def test_a_sparse_gradient_and_its_state_count():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    step(model, optimizer, torch.tensor([3, 3, 7]))
    now = held(model, optimizer)
    indices, values = model.weight.grad._indices(), model.weight.grad._values()
    assert now.gradients == indices.nbytes + values.nbytes > 0
    assert now.optimizer >= 2 * 160


@pytest.mark.filterwarnings("ignore")  # quantised and nested tensors are said to be old, or new
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.ones(3, dtype=torch.complex64), 24),
        (lambda: torch.ones(3, dtype=torch.bool), 3),
        (lambda: torch.ones(3, dtype=torch.int64), 24),
        (lambda: torch.ones(3, dtype=torch.bfloat16), 6),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), 3),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.quint8), 3),
        (lambda: torch.empty(0), 0),
        (lambda: torch.ones(3, device="meta"), 0),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 20),
    ],
    ids=["complex", "bool", "integer", "bfloat16", "float8", "quantised", "empty", "meta", "nested"],
)
def test_every_kind_of_tensor_holds_its_bytes(make, size):
    assert held(nn.Module(), parameters=[make()]).parameters == size


def test_a_lazy_module_holds_nothing_before_its_first_forward():
    model = nn.LazyLinear(5)
    assert held(model).parameters == 0
    model(torch.ones(1, 3))
    assert held(model).parameters == 80


def test_memory_that_pytorch_does_not_show_is_refused_in_plain_words():
    with pytest.raises(TypeError, match="its bytes cannot be counted"):
        held(nn.Module(), parameters=[torch.ones(3, 3).to_mkldnn()])


@pytest.fixture
def pretended():
    """Makes this process a rank in a process group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank, world_size):
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield become
    torch.distributed.destroy_process_group()


@pytest.fixture
def pretended_rank(pretended):
    """Rank 2 of 3."""
    pretended(2, 3)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_padding_is_held_and_not_needed(strategy, rank, pretended):  # H2
    pretended(rank, 4)
    module = importlib.import_module(f"chapter19_9.strategies.{strategy}")
    model = module.shard(nn.Linear(1, 2, bias=False), torch.device("cpu"))  # 2 elements on 4 ranks
    optimizer = module.optimizer(model, 0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    parts = module.gradient_parts(model) if hasattr(module, "gradient_parts") else ()
    now = held(model, optimizer, gradients=parts)
    mine = rank < 2
    if strategy not in ("zero1", "zero2"):  # there every rank has the whole weight, and needs it
        assert now.needed.parameters == 4 * mine
    if strategy != "zero1":
        assert (now.needed.gradients or 0) == 4 * mine
    assert (now.needed.optimizer or 0) == 12 * mine
    if strategy.startswith("zero"):
        assert now.optimizer == 12


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_gradients_that_wait_for_their_reduction_are_held_whole(wrap, pretended):  # H5
    pretended(0, 2)
    model = nn.Linear(256, 256, bias=False)
    x = torch.ones(1, 256)
    if wrap == "fsdp1":
        model = torch.distributed.fsdp.FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True
        )
        with model.no_sync():
            model(x).sum().backward()
            model(x).sum().backward()
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        model = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model(x).sum().backward()
        model.set_requires_gradient_sync(True)
    now = held(model)
    assert now.gradients == now.needed.gradients == 256 * 256 * 4
    assert "not yet allocated" not in str(now).splitlines()[1]
    model(x).sum().backward()
    assert held(model).gradients == 256 * 256 * 4 // 2


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
