"""A forked rank begins like one that was started as a program: warm and cold differ in speed and in nothing else."""

import os
import resource
import time

from d2l_utils import launch
from d2l_utils.launching import helper, limits
from tests.ranks.afresh_functions import begins, chooses_a_start_method, loads


def both_ways(monkeypatch, function=begins, launches=1, **options):
    """What the ranks of some launches found, by the way in which they were started."""
    found = {}
    for way in ("warm", "cold"):
        monkeypatch.setenv("D2L_LAUNCH", way)
        runs = [launch(function, output="quiet", **options) for _ in range(launches)]
        assert {run.way for run in runs} == {way}
        found[way] = [result for run in runs for result in run.results]
    return found


def test_all_that_a_rank_finds_is_the_same_both_ways(monkeypatch):
    found = both_ways(monkeypatch, world_size=2, launches=2)
    first = found["cold"][0]
    for way, results in found.items():
        for name in first["drawn"]:
            drawn = [str(result["drawn"][name]) for result in results]
            assert len(set(drawn)) == len(drawn), f"{way}: {name} is the same on two ranks or in two launches"
    for name in first.keys() - {"drawn", "environment"}:
        per_rank = {way: [result[name] for result in results] for way, results in found.items()}
        assert per_rank["warm"] == per_rank["cold"], name
    for warm, cold in zip(found["warm"], found["cold"], strict=True):
        assert warm["environment"] == cold["environment"]


def test_the_start_method_of_a_ranks_own_processes_can_be_chosen(monkeypatch):
    assert both_ways(monkeypatch, chooses_a_start_method, world_size=1) == {"warm": ["spawn"], "cold": ["spawn"]}


def test_a_data_loader_has_processes_of_its_own(monkeypatch):
    assert both_ways(monkeypatch, loads, world_size=1, workers=2) == {"warm": [[0, 1, 2, 3]], "cold": [[0, 1, 2, 3]]}


CHANGES = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", lambda r: r["torch"][4], "DebugLevel.DETAIL"),
    "TZ": ("Asia/Shanghai", lambda r: r["locale, zone"][1], ("CST", "CST")),
    "PYTHONWARNINGS": ("error::BytesWarning", lambda r: any("BytesWarning" in text for text in r["warnings"]), True),
    "PYTHONHASHSEED": ("7", lambda r: r["hash of str"], None),
    "OMP_NUM_THREADS": (
        "2",
        lambda r: (r["torch threads"][0], r["numpy threads"][0]),
        (2, min(2, len(os.sched_getaffinity(0)))),
    ),
}


def test_what_the_notebook_sets_after_its_helper_has_started_reaches_a_warm_rank(monkeypatch):
    """Variables that are read once, at a start or an import, and limits that a process hands on."""
    launch(begins, world_size=1, output="quiet")
    for name, (value, _, _) in CHANGES.items():
        monkeypatch.setenv(name, value)
    before = limits.of_this_process()
    soft, hard = before["limits"]["RLIMIT_NOFILE"]
    mask = os.umask(0o027)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        found = both_ways(monkeypatch, world_size=1)
        monkeypatch.setenv("D2L_LAUNCH", "warm")
        os.sched_setaffinity(0, before["affinity"][:1])
        (on_one,) = launch(begins, world_size=1, output="quiet").results
    finally:
        os.umask(mask)
        limits.take(before)
    for name, (_, look, expected) in CHANGES.items():
        seen = {way: look(results[0]) for way, results in found.items()}
        assert seen["warm"] == seen["cold"], name
        assert expected is None or seen["warm"] == expected, name
    for (result,) in found.values():
        assert result["umask"] == "0027" and result["limits"]["RLIMIT_NOFILE"] == (soft - 1, hard)
    assert on_one["processors"] == str(before["affinity"][0]) and on_one["numpy threads"] == [1]


def test_an_unused_helper_gives_its_memory_back_and_starts_again(monkeypatch, capsys):
    monkeypatch.setenv("D2L_HELPER_IDLE", "0.5")
    monkeypatch.setenv("D2L_LAUNCH", "warm")
    if helper._helper is not None:
        helper.discard(helper._helper)
    first = launch(loads, world_size=1, workers=0, output="quiet").results
    process = helper._helper.process
    deadline = time.monotonic() + 20
    while not (helper.asleep() and resident(process.pid) < 30e6) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert resident(process.pid) < 30e6 and helper.asleep()
    capsys.readouterr()
    run = launch(loads, world_size=1, workers=0)
    assert (run.results, run.way, helper._helper.process.pid) == (first, "warm", process.pid)
    assert "gave back its memory" in capsys.readouterr().out
    while not helper.asleep() and time.monotonic() < deadline + 20:
        time.sleep(0.05)
    assert helper.asleep()  # again
    folder = helper._helper.folder
    helper._helper.control.close()  # as when the kernel is killed
    process.wait(10)
    assert not folder.exists()
    helper.discard(helper._helper)


def resident(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
