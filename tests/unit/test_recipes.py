"""What a run says about several machines: the two-terminal recipe and Slurm's batch file, as text and as a shell reads them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2l_utils.launching import recipes
from d2l_utils.launching.launcher import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")


def a_run(script: str = "train.py", world_size: int = 4, arguments: list[str] | None = None) -> Run:
    return Run(
        results=[],
        script=Path(script),
        command="",
        world_size=world_size,
        nodes=1,
        device="cpu",
        backend="gloo",
        way="warm",
        seconds=0.0,
        folder=Path(),
        script_arguments=arguments or [],
    )


def test_the_recipe_has_one_line_a_machine():
    text = a_run().recipe(nodes=2)
    lines = [line.strip() for line in text.splitlines() if "torchrun" in line]
    same = "torchrun --nnodes=2 --nproc-per-node=2 --node-rank={} --master-addr=ADDRESS --master-port=29400 train.py"
    assert lines == [same.format(0), same.format(1)]
    assert "2 machines with 2 ranks each: world size 4" in text and "hostname -I" in text
    assert "hostname -I" not in a_run().recipe(nodes=2, ranks_per_node=8, address="10.0.0.7")


def shell(folder: Path, batch: str, nodes: list[str]) -> list[list[str]]:
    """Run a batch file with programs that stand in for Slurm's; torchrun only writes down what it is given, once a node."""
    programs = {
        "scontrol": "printf '%s\\n' " + " ".join(nodes) + "; seq 100000",  # more hosts than a pipe holds
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nfor n in '
        + " ".join(str(n) for n in range(len(nodes)))
        + '; do SLURM_NODEID=$n "$@"; done',
        "torchrun": 'printf "%s\\n" "OMP=$OMP_NUM_THREADS" "$@" --',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_JOB_ID": "123456",
    }
    (folder / "job.sh").write_text(batch)
    done = subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return [call.splitlines() for call in done.stdout.split("--\n")[:-1]]


def test_the_batch_file_as_a_shell_reads_it(tmp_path):
    """Odd names and arguments come through; a long list of hosts does not end it (a pipe into head would)."""
    nodes = [f"node-with-a-long-name-{n:05}" for n in range(3)] + ["another"] * 5
    run = a_run("my run's.py", 16, ["--name=a b", "--sign=$HOME"])
    calls = shell(tmp_path, run.slurm(nodes=8, cores_per_rank=3, setup="true $unset"), nodes)
    assert len(calls) == 8
    for node, call in enumerate(calls):
        assert call == [
            "OMP=3",
            "--nnodes=8",
            "--nproc-per-node=2",
            f"--node-rank={node}",
            "--master-addr=node-with-a-long-name-00000",
            "--master-port=23456",
            "my run's.py",
            "--name=a b",
            "--sign=$HOME",
        ]


@pytest.mark.parametrize("gpus", [True, False])
def test_what_slurm_is_asked_for(gpus, tmp_path):
    text = a_run().slurm(
        nodes=2, ranks_per_node=4, gpus=gpus, cores_per_rank=8, time="2-00:00:00", setup="source env/bin/activate"
    )
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert asked == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        *(["--gpus-per-node=4"] if gpus else []),
        "--cpus-per-task=32",
        "--time=2-00:00:00",
        "--output=%x-%j.log",
    ]
    # Slurm stops looking for its own lines at the first command.
    assert text.index("#SBATCH --output") < text.index("source env/bin/activate") < text.index("srun ")
    batch = tmp_path / "job.sh"
    batch.write_text(text)
    subprocess.run(["bash", "-n", str(batch)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091", str(batch)], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": True}, "nodes is True"),
        ({"nodes": 3}, "nodes is 3, which does not divide this run's 4 ranks"),
        ({"ranks_per_node": 1.5}, "ranks_per_node is 1.5"),
    ],
)
@pytest.mark.parametrize("form", ["recipe", "slurm"])
def test_bad_numbers(form, arguments, words):
    with pytest.raises(ValueError, match=words):
        getattr(a_run(), form)(**arguments)


@pytest.mark.parametrize("address", ["", "a b", "x; rm y", 7])
def test_a_bad_address(address):
    with pytest.raises(ValueError, match="address is"):
        a_run().recipe(address=address)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"time": "soon"}, ValueError, "time is 'soon'"),
        ({"cores_per_rank": 0}, ValueError, "cores_per_rank is 0"),
        ({"gpus": 4}, TypeError, "gpus is 4"),
        ({"setup": ["a"]}, TypeError, "setup is a list"),
    ],
)
def test_bad_wishes(arguments, error, words):
    with pytest.raises(error, match=words):
        a_run().slurm(**arguments)


def test_ranks_are_shared_out():
    assert recipes.share(8, 2) == 4
