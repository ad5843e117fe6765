"""Processors that ranks may use: affinity, and the share of processor time that a container has."""

import os

import pytest

from d2l_utils.launching import environment, limits


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("limit", "processors"),
    [("max 100000\n", float("inf")), ("150000 100000\n", 1.5), ("50000 100000\n", 0.5), ("nonsense", float("inf"))],
)
def test_version_2(tmp_path, limit, processors):
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    group(tmp_path / "fs/a/b", cpu__max=limit)
    assert limits.cpu_quota(tmp_path / "fs", tmp_path / "cgroup") == processors


def test_a_group_above_may_allow_less(tmp_path):
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    group(tmp_path / "fs/a/b", cpu__max="400000 100000")
    group(tmp_path / "fs/a", cpu__max="300000 100000")
    group(tmp_path / "fs")
    assert limits.cpu_quota(tmp_path / "fs", tmp_path / "cgroup") == 3


def test_inside_a_container_the_group_is_the_root(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    group(tmp_path / "fs", cpu__max="200000 100000")
    assert limits.cpu_quota(tmp_path / "fs", tmp_path / "cgroup") == 2


@pytest.mark.parametrize(("quota", "processors"), [("-1\n", float("inf")), ("250000\n", 2.5)])
def test_version_1(tmp_path, quota, processors):
    (tmp_path / "cgroup").write_text("9:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n")
    group(tmp_path / "fs/cpu", **{"cpu__cfs_quota_us": quota, "cpu__cfs_period_us": "100000\n"})
    assert limits.cpu_quota(tmp_path / "fs", tmp_path / "cgroup") == processors


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert limits.cpu_quota(tmp_path, tmp_path / "missing") == float("inf")


@pytest.mark.parametrize(("quota", "cores"), [(float("inf"), 4), (1.5, 2), (0.2, 1), (9, 4)])
def test_threads_are_shared_out_of_what_is_allowed(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(limits, "cpu_quota", lambda: quota)
    assert limits.cores() == cores and environment.threads_per_rank(2, {}) == max(1, cores // 2)
