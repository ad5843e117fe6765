"""No search for garbage inside the block, and Python as it was behind it."""

import gc

import pytest

from d2l_utils.garbage import collected_later


def test_the_search_is_off_inside_and_on_again_behind_it_whatever_happens():
    with collected_later():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collected_later():
        raise KeyError
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off():
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
