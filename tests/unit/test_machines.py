"""A rank on one of several machines: which network it takes, and when it takes another machine for gone. Without any process."""

import types

import psutil
import pytest

from d2l_utils.launching import machines

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "here",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"LOCAL_WORLD_SIZE": "4"}, False),
        ({"D2L_RUN_FOLDER": "a launch of ours"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
    ],
)
def test_only_torchruns_ranks_on_several_machines_need_it(change, found):
    assert machines.several(TORCHRUN | change) is found


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", ""])
def test_a_bad_node_timeout(text):
    with pytest.raises(ValueError, match=r"D2L_NODE_TIMEOUT is .*a number of seconds above 0"):
        machines.node_timeout({"D2L_NODE_TIMEOUT": text})


def test_node_timeouts():
    assert machines.node_timeout({}) == 60 and machines.node_timeout({"D2L_NODE_TIMEOUT": "2.5"}) == 2.5


class Store(dict):
    """What the store answers, without a process."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def add(self, key, amount):
        self[key] = dict.get(self, key, 0) + amount
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def network(monkeypatch):
    """A machine with two networks; `here`, its own name, leads to its loopback, as on Debian."""
    ways = {
        "here": "127.0.1.1",
        "first": "10.0.0.2",
        "10.0.0.9": "10.0.0.2",
        "fe80::9": "fe80::2",
        "127.0.1.1": "127.0.1.1",
    }
    cards = {"lo": ["127.0.0.1", "127.0.1.1"], "eth0": ["192.168.0.2"], "fast0": ["10.0.0.2", "fe80::2%fast0"]}
    monkeypatch.setattr(machines, "own_address", ways.get)
    found = {name: [types.SimpleNamespace(address=a) for a in addresses] for name, addresses in cards.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("meeting", "other", "name"),
    [
        ("first", "", "fast0"),
        ("here", "10.0.0.9", "fast0"),  # the ranks meet on this machine: the way to another node
        ("here", "fe80::9", "fast0"),
        ("here", "127.0.1.1", "lo"),  # two agents on one host
        ("nowhere", "", None),
    ],
)
def test_the_network_that_leads_to_the_others(network, meeting, other, name):
    store, here = Store(), TORCHRUN | {"MASTER_ADDR": meeting}
    store.set(machines.key(here, 1, "address"), other)
    assert machines.interface(store, here) == name
    assert store[machines.key(here, 0, "address")] == (machines.own_address(meeting) or "").encode()


@pytest.fixture
def watch(monkeypatch):
    """A watch that asks only when it is told, by a clock of the test's own."""
    monkeypatch.setattr(machines.threading.Thread, "start", lambda self: None)
    now = types.SimpleNamespace(time=100.0)
    monkeypatch.setattr(machines.time, "monotonic", lambda: now.time)
    store = Store()
    made = machines.Watch(store, TORCHRUN, limit=10.0)

    def look(seconds, number):
        """Time passes, and the other node's number is now this."""
        now.time += seconds
        store[machines.key(TORCHRUN, 1, "number")] = number
        made._read()
        made.answered = now.time
        return made.silent(now.time)

    made.look, made.now = look, now
    return made


def test_a_node_is_missed_once_it_was_there(watch):
    assert watch.look(1000, 0) is None  # it still imports
    watch.store.set(machines.key(TORCHRUN, 1, "name"), "far, ranks 2 to 3")
    assert watch.look(1, 1) is None and watch.look(9, 2) is None and watch.look(10, 2) is None
    assert watch.look(1, 2) == "node 1 (far, ranks 2 to 3)"
    assert watch.look(1, 3) is None


def test_a_node_that_has_finished_is_not_missed(watch):
    assert watch.look(1, 5) is None
    assert watch.look(1, 5 + machines._FINISHED) is None and watch.look(1000, 5 + machines._FINISHED) is None


def test_a_store_that_does_not_answer(watch):
    assert watch.silent(1e9) is None  # it never has: joining the group tells of that
    watch.look(1, 1)
    assert watch.silent(watch.now.time + 10) is None
    assert watch.silent(watch.now.time + 11) == "here, where the ranks meet,"
