"""Real machines as far as one machine has them: the script that launch wrote, on two hosts that share nothing but a cable."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from d2l_utils import launch
from tests.ranks import hosts


def steps(number):
    """Some steps of data-parallel training by hand: each rank's own gradient, averaged. PAUSE: seconds after each."""
    import os
    import time

    import torch
    import torch.distributed as dist

    rank, size, pause = dist.get_rank(), dist.get_world_size(), float(os.environ.get("PAUSE", "0"))
    weight = torch.zeros(3)
    for step in range(number):
        gradient = (weight - rank) * torch.tensor([1.0, 2.0, 3.0])
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient / size
        if step == number // 2:
            print("half-way", flush=True)
        time.sleep(pause)
    return rank, int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"]), weight.tolist()


@pytest.fixture(scope="module")
def run():
    return launch(steps, world_size=4, nodes=2, number=8, output="quiet")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    hosts.needed()
    with hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def torchrun_lines(recipe):
    return [line.strip() for line in recipe.splitlines() if line.strip().startswith("torchrun")]


def start(pair, run, ranks_per_node, **env):
    """The recipe's own lines, each on its host, beside the saved script."""
    for host in pair:
        run.save(host.folder)
    lines = torchrun_lines(run.recipe(nodes=2, ranks_per_node=ranks_per_node, address=pair[0].address))
    return [host.run(line, **env) for host, line in zip(pair, lines, strict=True)]


def printed(pair):
    """Each rank's result, from both logs, in rank order."""
    found = re.findall(r"^\[rank (\d+)\] (\(.*)$", "".join(host.log.read_text() for host in pair), re.MULTILINE)
    return [ast.literal_eval(value) for _, value in sorted(found, key=lambda each: int(each[0]))]


def test_the_script_that_launch_wrote_on_two_hosts(pair, run):
    ended = [process.wait(120) for process in start(pair, run, ranks_per_node=2)]
    text = "\n".join(host.log.read_text() for host in pair)
    assert ended == [0, 0], text
    assert printed(pair) == run.results
    assert [result[:3] for result in run.results] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert not pair[0].left() and not pair[1].left()


def test_a_host_that_is_cut_off_is_named_and_its_peer_ends(pair, run):
    agents = start(pair, run, ranks_per_node=1, D2L_NODE_TIMEOUT="6", PAUSE="2")
    wait_for("half-way", pair)
    pair[1].do("ip link set lan0 down")
    cut = time.monotonic()
    ended = [agent.wait(120) for agent in agents]
    print(f"both torchruns had ended {time.monotonic() - cut:.1f} s after the cut, of which 6 s of waiting")
    near, far = (host.log.read_text() for host in pair)
    assert all(ended), near + far
    reason = "has not answered for 6 s: that machine is gone, or the network to it"
    assert f"[rank 0] node 1 (node-b, rank 1) {reason}" in near
    assert f"[rank 1] {pair[0].address}, where the ranks meet, {reason}" in far
    # torchrun's own report, the last thing on the screen, says it too
    assert f"ConnectionError: node 1 (node-b, rank 1) {reason}" in near.partition("Root Cause")[2]
    assert printed(pair) == []
    assert not pair[0].left() and not pair[1].left()
    pair[1].do("ip link set lan0 up")


# Slurm itself is not here. These two small programs stand in for the parts of it that the batch file calls: one knows the job's
# hosts, the other starts one task on each, tells it its number, and fails when one does.
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node-[a-b]" ] && printf 'node-a\\nnode-b\\n'
"""
SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
node=0
for first in $FIRSTS; do
    SLURM_NODEID=$node nsenter --target="$first" --net --uts --mount --pid sh -c 'cd "$0" && exec "$@"' "$PWD" "$@" &
    tasks="$tasks $!" node=$((node + 1))
done
status=0
for task in $tasks; do wait "$task" || status=$?; done
exit $status
"""


def test_the_batch_file_for_slurm(pair, run, tmp_path):
    """Its first host is named, not numbered, and that name leads the host itself to its own loopback."""
    batch = run.save(tmp_path).with_name("job.sh")
    batch.write_text(run.slurm(nodes=2, ranks_per_node=1, gpus=False))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "4321",
        "OMP_NUM_THREADS": "1",
    }
    env = hosts.environment(tmp_path, **job, FIRSTS=" ".join(str(host.first) for host in pair))
    env["PATH"] = f"{programs}:{env['PATH']}"
    done = subprocess.run(
        ["bash", str(batch)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"^\[rank (\d)\] \((\d), (\d), (\d), ", done.stdout, re.MULTILINE)) == [
        ("0", "0", "0", "0"),
        ("1", "1", "0", "1"),
    ], done.stdout + done.stderr
    assert not pair[0].left() and not pair[1].left()


def wait_for(words, pair, seconds=100):
    deadline = time.monotonic() + seconds
    while not all(words in host.log.read_text() for host in pair):
        assert time.monotonic() < deadline, "\n".join(host.log.read_text() for host in pair)
        time.sleep(0.05)


def test_a_killed_tester_leaves_no_host(tmp_path):
    hosts.needed()
    code = f"""
import time
from pathlib import Path
from tests.ranks.hosts import two_hosts
with two_hosts(Path({str(tmp_path)!r})) as pair:
    agents = [host.run("sleep 300") for host in pair]
    print(*(host.first for host in pair), flush=True)
    time.sleep(300)
"""
    root = Path(__file__).resolve().parents[2]
    tester = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    firsts = [int(pid) for pid in tester.stdout.readline().split()]
    running = [p for first in firsts for p in [psutil.Process(first)]]
    running += [p for p in psutil.process_iter() if p.pid in children_of(tester.pid)]
    assert len(firsts) == 2 and len(running) >= 6  # two hosts: a first process, a holder, a sleep and its way in
    tester.kill()
    tester.wait()
    tester.stdout.close()
    _, left = psutil.wait_procs(running, timeout=10)
    assert not left


def children_of(pid):
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@pytest.mark.parametrize("ci", ["1", ""])
def test_where_namespaces_are_forbidden_ci_fails_and_others_skip(ci, monkeypatch, tmp_path):
    """Root in a container may lack the right: `unshare` then says why."""
    programs = {
        "unshare": "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1",
        "ip": "",
        "nsenter": "",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("D2L_CI", ci)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    kind = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(kind, match=r"does not let its root make namespaces: .*Operation not permitted"):
        hosts.needed()
