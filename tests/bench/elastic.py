"""The fastest launch there is: torch's elastic launcher forking inside a process that has imported everything already.

It is what notebook launchers do, and what ours may not do (the caller's threads and accelerator would be forked too). For a fair
comparison it runs in a process of its own that waits with its imports done; timed is one launch.
"""

import subprocess
import sys
from pathlib import Path

_SERVER = """
import sys, runpy, uuid
import torch, torch.distributed.run, torch._dynamo
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def main(script):
    runpy.run_path(script, run_name="__main__")

print("ready", flush=True)
for line in sys.stdin:
    ranks, script = line.rstrip("\\n").split(" ", 1)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), run_id=str(uuid.uuid4()), rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.02, start_method="fork")
    elastic_launch(config, main)(script)
    print("done", flush=True)
"""


class Forker:
    """A process that forks ranks on request."""

    def __enter__(self) -> "Forker":
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._expect("ready")
        return self

    def run(self, script: Path, ranks: int) -> None:
        """One launch of the script on so many ranks."""
        assert self.process.stdin
        self.process.stdin.write(f"{ranks} {script}\n")
        self.process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the forking process said {line!r} instead of {word!r}")

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)
