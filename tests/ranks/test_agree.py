"""Whether the ranks hold the same, asked of tensors of every kind."""

import pytest

from d2l_utils import launch
from tests.ranks import agree_functions as ranks


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=60, **arguments).results


def test_every_kind_of_tensor_is_compared_between_ranks():
    apart = {
        "coo": 2, "csr": 2, "complex": 5, "bool": 1, "integer": 1, "large integer": 1, "ends": float(2**64 - 1),
        "double": 2**-40, "bfloat16": 1, "float8": 1, "quantised": 1,
    }  # fmt: skip
    for result in run(ranks.pairs, 3):
        assert {kind: alike for kind, (alike, _) in result.items()} == dict.fromkeys(result, (True, 0.0))
        assert {kind: other for kind, (_, other) in result.items() if kind != "empty"} == {
            kind: (False, difference) for kind, difference in apart.items()
        }


@pytest.mark.parametrize("rows", [4, 5, 1])  # on 2 ranks: equal shards, unequal ones, and one without rows
def test_sharded_tensors_are_compared_as_the_whole_and_replicas_with_each_other(rows):
    for result in run(ranks.sharded, 2, rows=rows):
        assert {name: result[name] for name in ("shard", "columns", "partial", "replicas")} == dict.fromkeys(
            ("shard", "columns", "partial", "replicas"), (True, 0.0, 0.0)
        )
        assert result["other replicas"][:2] == (False, 1.0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lazy", "weight has no values yet: a lazy module gets them in its first forward"),
        ("meta", "tensor 0 has no values: it is on the meta device"),
    ],
)
def test_no_rank_waits_when_one_has_nothing_to_compare(what, said):
    one, other = run(ranks.unlike, 2, what=what)
    assert other == [said] * 2
    assert one == ["tensors of rank 1 cannot be compared: see its own error"] * 2


def test_ranks_with_other_shapes_or_types_are_told_apart():
    for what in ("shape", "type"):
        assert run(ranks.unlike, 2, what=what) == [["False", f"tensors have different {what}s on different ranks"]] * 2


def test_a_group_with_a_backend_for_each_type_of_device_takes_what_it_is_given():
    assert run(ranks.in_two_backends, 2) == [[True, True, 0.0, True]] * 2
