"""The batch-size panel and its arithmetic, in both directions."""

import re

import pytest

from d2l_utils.batch import Batch, combinations, global_batch, nearest
from d2l_utils.widgets import BatchPanel


def test_global_batch_and_back():
    assert global_batch(4, 8, 16) == 512
    assert global_batch(2, 16, 8) == 256
    ways = combinations(512, 8)
    assert ways[0] == Batch(64, 8, 1)
    assert ways[-1] == Batch(1, 8, 64)
    assert {way.size for way in ways} == {512}
    assert len(ways) == len(set(ways)) == 7
    assert combinations(512, 6) == []
    assert nearest(512, 6) == (510, 516)
    assert nearest(512, 8) == (512,)
    assert nearest(3, 8) == (8,)
    assert combinations(512, 8, largest_micro=4) == [Batch(4, 8, 16), Batch(2, 8, 32), Batch(1, 8, 64)]


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None, True])
def test_bad_batch_numbers_name_themselves(bad):
    with pytest.raises(ValueError, match=re.escape(f"ranks is {bad!r}; it must be a whole number")):
        global_batch(4, bad, 2)
    with pytest.raises(ValueError, match=re.escape(f"target is {bad!r}")):
        combinations(bad, 2)


def test_batch_panel_is_live_in_both_directions():
    panel = BatchPanel()
    assert panel.size == 512
    assert panel.ways == []
    assert "none, 6 does not divide 512; nearest: 510 and 516" in panel.answer.value
    before = panel.picture.value
    panel.knobs["micro_batch"].value = 2
    assert panel.size == 256
    assert panel.picture.value != before
    panel.wanted["ranks"].value = 4
    assert len(panel.ways) == 8
    assert panel.answer.value.count("<tr>") == 9
    bundle, _ = panel._repr_mimebundle_()
    assert bundle["text/plain"].splitlines()[1:] == [
        "2 samples × 8 ranks × 16 passes = 256",
        "512 on 4 ranks: 8 ways",
    ]
    assert bundle["image/png"]
