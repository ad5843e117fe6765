"""The exercises' checks without ranks: each accepts what is right, and says of what is wrong where it is."""

import pytest

from chapter19_9.exercises import EXERCISES, check, is_stub


def empty():
    """Yours."""


def begun():
    """Yours."""
    return 1


RIGHT = {
    "average": (2, [1.5, 1.5]),
    "unequal": (2, [2 / 3, 2 / 3]),
    "shift": (3, [2, 0, 1]),
    "reduce and broadcast": (2, [11, 11]),
    "reshuffle": (2, [([0, 1, 2, 3, 4, 5], [11, 9, 7, 5, 3, 1]), ([6, 7, 8, 9, 10, 11], [10, 8, 6, 4, 2, 0])]),
    "mean of ten": (3, [4.5] * 3),
    "optimizer bytes": (2, [(8, 8), (4, 4)]),
    "my shard": (4, [[0, 3], [3, 6], [6, 9], [9, 10]]),
    "flat shard": (2, [(109, 109), (109, 109)]),
    "rows": (2, [(124, 124), (93, 93)]),
    "peak": (2, [(104, 100), (97, 100)]),
    "cluster": (2, [(3, 102)] * 2),
    "sharded product": (2, [12.0, 12.0]),
    "kept": (2, [[12.0, 4, 8]] * 2),
    "gathers": (2, [[1, 2]] * 2),
    "two halves": (2, [36.0, 36.0]),
    "on the wire": (2, [(4_800_000, 4_812_345), (4_800_000.0, None)]),
    "window": (2, [(3.5, 1), (3.5, 1)]),
    "read back": (2, [([1, 1, 2, 3, 5], [0, 1]), ([8, 13, 21, 34, 55], [1, 2, 3])]),
    "bytes in bf16": (2, [(8192, 8192)] * 2),
}
# one rank's answer that is a likely mistake, and what the check says of it
WRONG = {
    "average": (3.0, "rank 1 returned 3, expected 1.5"),
    "unequal": (0.5, "rank 1 returned 0.5"),
    "shift": (1, "rank 1 returned 1, expected 0"),
    "reduce and broadcast": (10, "expected 11"),
    "reshuffle": (([6] * 6, [1] * 6), "in epoch 0 the ranks together drew"),
    "mean of ten": (4.4, "expected 4.5"),
    "optimizer bytes": ((8, 4), "rank 1 predicted 8 bytes and measured 4"),
    "my shard": ([2, 5], "rank 1 returned [2, 5], expected [3, 6]"),
    "flat shard": ((108, 109), "rank 1 predicted 108 and measured 109"),
    "rows": ((109, 109), "rank 1 measured 109, expected 93"),
    "peak": ((90, 100), "rank 1 predicted 90 bytes and reached 100"),
    "cluster": ((3, 67), "rank 1 returned 67 GB, which is too little"),  # a whole third less is not enough
    "sharded product": (8.0, "expected 12"),
    "kept": ([12.0, 8, 8], "rank 1 returned [12.0, 8, 8], expected [12.0, 4, 8]"),  # numel() is that of the whole
    "gathers": ([2, 2], "expected [1, 2]"),
    "two halves": (12.0, "expected 36"),
    "on the wire": ((2_400_000, 4_812_345), "rank 1 predicted 2,400,000 bytes; the kernel counts about 4,812,345"),
    "window": ((3.5, 2), "rank 1 counted 2 all-reduces"),
    "read back": (([8, 13, 21, 34, 55], [0, 1, 2, 3]), "rank 1 read the files [0, 1, 2, 3], and needs [1, 2, 3]"),
    "bytes in bf16": ((4096, 8192), "rank 1 predicted 4096 bytes and measured 8192"),
}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_check_knows_right_from_wrong(name):
    n, results = RIGHT[name]
    wrong, said = WRONG[name]
    judge = EXERCISES[name].judge
    assert judge(results, n) is None
    assert said in judge([results[0], wrong, *results[2:]], n)


@pytest.mark.parametrize(
    ("answer", "said"),
    [((2, 102), "2 nodes, which are too few"), ((4, 80), "4 nodes, and fewer do"), ((3, 103), "103 GB, and less does")],
)
def test_a_cluster_is_neither_too_small_nor_too_large(answer, said):
    assert said in EXERCISES["cluster"].judge([answer], 1)


def test_what_is_measured_on_the_wire_must_be_the_reduce_scatter_alone():
    judge = EXERCISES["on the wire"].judge
    assert "is the reduce-scatter alone" in judge([(4_800_000, 9_600_000)] * 2, 2)


def test_an_exercise_that_is_not_begun_says_so(capsys):
    assert is_stub(empty) and not is_stub(begun)
    check("average", empty)
    assert capsys.readouterr().out == "average: not done yet\n"
    with pytest.raises(ValueError, match="name is 'nothing': it must be one of average"):
        check("nothing", empty)
