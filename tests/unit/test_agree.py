"""How far tensors are apart, of every kind: in one process, and between the ranks of a group of one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from chapter19_9.strategies import ring, shards
from d2l_utils import agree
from d2l_utils.agree import digest, largest_difference, ranks_agree, relative_difference


def test_relative_difference_is_that_of_one_long_vector():
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    one = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([[4.4]])}
    assert relative_difference(one, other) == pytest.approx(0.5 / 5)
    assert relative_difference(other, other) == 0


def test_relative_difference_refuses_what_cannot_be_compared():
    with pytest.raises(ValueError, match="'b'"):
        relative_difference({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ValueError, match="zeros"):
        relative_difference({"a": torch.ones(1)}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a has shape \(2, 1\) in one and \(2,\) in other"):
        relative_difference({"a": torch.ones(2, 1)}, {"a": torch.ones(2)})


def test_relative_difference_of_complex_numbers_sees_both_parts():
    one, other = torch.tensor([3 + 4j, 0]), torch.tensor([3 + 0j, 0])
    assert relative_difference({"a": one}, {"a": other}) == pytest.approx(4 / 3)


@pytest.fixture(scope="module")
def alone():
    """This process is the one rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


KINDS = [
    "coo", "csr", "csc", "bsr", "mkldnn", "complex", "conjugate", "bool", "integer", "unsigned", "double", "bfloat16",
    "float8", "nested", "scale", "scales", "scalar",
]  # fmt: skip


def kinds():
    """Pairs of tensors of one kind that differ in the least way that the kind allows."""
    eye, other = torch.eye(4), torch.eye(4)
    other[1, 1] = 1 + 2**-23
    ones = torch.ones(3)
    pairs = {
        "coo": (eye.to_sparse(), other.to_sparse()),
        "csr": (eye.to_sparse_csr(), other.to_sparse_csr()),
        "csc": (eye.to_sparse_csc(), other.to_sparse_csc()),
        "bsr": (eye.to_sparse_bsr((2, 2)), other.to_sparse_bsr((2, 2))),
        "mkldnn": (eye.to_mkldnn(), other.to_mkldnn()),
        "complex": (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        "conjugate": (torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j])),
        "bool": (torch.tensor([True]), torch.tensor([False])),
        "integer": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        "unsigned": (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**63 + 1], dtype=torch.uint64)),
        "double": (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1 + 2**-52], dtype=torch.float64)),
        "bfloat16": (torch.tensor([1.0]).bfloat16(), torch.tensor([1.01]).bfloat16()),
        "float8": (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.25]).to(torch.float8_e4m3fn)),
        "nested": (torch.nested.nested_tensor([ones, ones[:2]]), torch.nested.nested_tensor([ones, 2 * ones[:2]])),
        "scale": (
            torch.quantize_per_tensor(ones, 0.1, 2, torch.quint8),
            torch.quantize_per_tensor(2 * ones, 0.2, 2, torch.quint8),
        ),
        "scales": (
            torch.quantize_per_channel(eye, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8),
            torch.quantize_per_channel(2 * eye, 2 * torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8),
        ),
        "scalar": (torch.tensor(1.0), torch.tensor(2.0)),
    }
    return pairs


@pytest.mark.filterwarnings("ignore")  # sparse and quantised tensors are said to be new, or old
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_compared_exactly(kind, alone):
    pairs = kinds()
    assert list(pairs) == KINDS
    one, other = pairs[kind]
    assert digest([one]) == digest([one.clone()]) != digest([other])
    assert ranks_agree([one])
    assert largest_difference([one]) == 0
    if kind not in ("integer", "unsigned"):  # in float64 those two are the same
        assert relative_difference({"a": one}, {"a": one}) == 0
        assert relative_difference({"a": other}, {"a": one}) > 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_how_a_sparse_tensor_was_added_up_does_not_matter():
    parts = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    assert digest([parts]) == digest([parts.coalesce()])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()])
def test_a_sharded_tensor_is_compared_as_the_whole(placement, alone):
    if placement.is_partial():
        tensor = DTensor.from_local(torch.ones(3), alone, [placement])
    else:
        tensor = distribute_tensor(torch.ones(3), alone, [placement])
    assert digest([tensor]) == digest([torch.ones(3)])
    assert ranks_agree([tensor])
    assert largest_difference([tensor]) == 0
    assert relative_difference({"a": tensor}, {"a": torch.ones(3)}) == 0


def test_tensors_without_values_are_named(alone):
    for ask in (digest, ranks_agree, largest_difference):
        with pytest.raises(ValueError, match="weight has no values yet: a lazy module gets them in its first forward"):
            ask(nn.LazyLinear(2))
        with pytest.raises(ValueError, match="tensor 1 has no values: it is on the meta device"):
            ask([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match="a has no values"):
        relative_difference({"a": torch.ones(1, device="meta")}, {"a": torch.ones(1)})


def test_values_that_pytorch_does_not_give_are_refused_in_plain_words(alone):
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert ranks_agree([packed])
    with pytest.raises(ValueError, match="tensor 0 cannot be compared: PyTorch does not give the values of float4"):
        largest_difference([packed])


def test_tensors_can_be_given_in_any_form(alone):
    model = nn.Linear(2, 2)
    forms = [model, model.state_dict(), list(model.parameters()), tuple(model.parameters()), model.parameters()]
    assert len({digest(form) for form in forms}) == 1
    assert ranks_agree(model.parameters())
    assert largest_difference(model.parameters()) == 0
    assert ranks_agree(torch.ones(3))
    assert ranks_agree([])
    assert largest_difference([]) == 0


def test_a_modules_buffers_count():
    model = nn.BatchNorm1d(1)
    before = digest(model)
    model.running_mean += 1
    assert digest(model) != before


# Where a rank's answer goes


class Group:
    """A process group that serves these types of devices."""

    def __init__(self, *types):
        self._device_types = [torch.device(kind) for kind in types]


def test_what_is_sent_lies_where_the_group_takes_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    here, meta = ("a", torch.ones(1)), ("b", torch.ones(1, device="meta"))
    assert agree._device([], Group("cuda", "cpu")) == torch.device("cpu")
    assert agree._device([here], Group("cuda", "cpu")) == torch.device("cpu")
    assert agree._device([here], Group("cuda")) == torch.device("cuda", 3)
    assert agree._device([], Group("cuda")) == torch.device("cuda", 3)
    assert agree._device([meta], Group("cpu", "meta")) == torch.device("meta")


def test_a_rank_without_gradients_sends_its_zero_from_its_own_device(alone, monkeypatch):  # W12
    sent = []
    monkeypatch.setattr(shards, "rank_device", lambda: torch.device("meta"), raising=False)
    monkeypatch.setattr(shards.dist, "all_reduce", lambda tensor: sent.append(tensor.device.type))
    with pytest.raises(RuntimeError):  # a meta tensor has no number to give back
        shards.global_norm([])
    assert sent == ["meta"]


@pytest.mark.parametrize(
    ("backends", "device", "way"),
    [
        ("cpu:gloo,meta:nccl", "cpu", "_ring"),
        ("cpu:gloo,meta:nccl", "meta", "_backend"),
        ("cpu:gloo,cuda:gloo", "cpu", "_ring"),
        ("cpu:fake,cuda:fake", "cpu", "_backend"),
    ],
)
def test_the_way_to_reduce_scatter_is_chosen_by_the_backend_that_carries_the_tensor(backends, device, way, monkeypatch):
    taken = []
    for name in ("_ring", "_direct", "_backend"):
        monkeypatch.setattr(ring, name, lambda part, whole, name=name: taken.append(name))
    monkeypatch.setattr(ring.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ring.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ring.dist, "get_backend", lambda: backends)  # as a group with two backends says
    monkeypatch.setattr(ring.dist, "get_backend_config", lambda: backends)
    ring.reduce_scatter(torch.empty(1, device=device), torch.empty(2, device=device))
    assert taken == [way]
