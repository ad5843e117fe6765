"""The text: the same pieces for everybody, in order, with no download."""

import re
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from d2l_utils.text import Text, batches, corpus, sequences


def test_the_corpus_is_english_and_large():
    text = corpus().decode("utf-8")
    words = re.findall(r"[a-z]+", text.lower())
    often = [word for word, _ in Counter(words).most_common(12)]
    assert len(text) > 300_000
    assert often[0] == "the" and {"a", "is", "of", "to"} <= set(often)
    assert words.count("the") > 0.03 * len(words)


def test_rows_are_consecutive_pieces_and_the_byte_that_follows():
    rows = sequences(10, 4, offset=2)
    assert rows.shape == (4, 11)
    assert rows.dtype == torch.int64
    for i, row in enumerate(rows):
        start = (2 + i) * 10
        assert bytes(row.tolist()) == corpus()[start : start + 11]
    assert torch.equal(rows[:-1, -1], rows[1:, 0])


def test_a_part_of_the_rows_is_what_asking_for_the_part_gives():
    assert torch.equal(sequences(16, 3, offset=5), sequences(16, 8)[5:])


def test_past_its_end_the_text_starts_again():
    size = len(corpus())
    row = sequences(size, 2)[1]
    assert torch.equal(row[:-1], sequences(size, 1)[0][:-1])
    last = sequences(1000, 1, offset=size // 1000)[0]
    left = size % 1000
    assert bytes(last[left:].tolist()) == corpus()[: 1001 - left]


def test_the_caller_cannot_change_the_text():
    before = sequences(8, 2).clone()
    sequences(8, 2).zero_()
    assert torch.equal(sequences(8, 2), before)


def test_batches_follow_one_another():
    got = list(batches(8, 2, 3, offset=1))
    rows = sequences(8, 6, offset=1)
    assert torch.equal(torch.cat([tokens for tokens, _ in got]), rows[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in got]), rows[:, 1:])
    assert all(tokens.is_contiguous() for tokens, _ in got)


def test_the_dataset_serves_a_sampler_and_a_loader():
    data = Text(8, size=10)
    assert len(data) == 10
    assert torch.equal(data[3][0], sequences(8, 1, offset=3)[0, :-1])
    assert torch.equal(data[3][1], sequences(8, 1, offset=3)[0, 1:])
    with pytest.raises(IndexError, match="index is 10"):
        data[10]
    sampler = DistributedSampler(data, num_replicas=3, rank=2, shuffle=False)
    tokens, targets = next(iter(DataLoader(data, batch_size=2, sampler=sampler)))
    assert tokens.shape == targets.shape == (2, 8)
    assert len(Text(8)) * 8 < len(corpus())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequences(0, 1), "length is 0: it must be a whole number of at least 1"),
        (lambda: sequences(8, 0), "count is 0"),
        (lambda: sequences(8, 1, offset=-1), "offset is -1"),
        (lambda: sequences(8.0, 1), "length is 8.0"),
        (lambda: sequences(8, True), "count is True"),
        (lambda: list(batches(8, 0, 1)), "batch is 0"),
        (lambda: list(batches(8, 1, -1)), "steps is -1"),
        (lambda: Text(0), "length is 0"),
        (lambda: Text(10**9), "length is 1000000000: the text has"),
        (lambda: Text(8, size=10**9), "size is 1000000000: the text has"),
        (lambda: Text(8, size=-1), "size is -1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
