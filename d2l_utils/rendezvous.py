"""How the torchrun agents of one launch find each other when they all live on this host: over loopback, and over loopback only.

torchrun's own rendezvous listens on every network interface, and whoever reaches that port can run code in the agent (its
values are unpickled). This handler is torchrun's static rendezvous with its store on a socket bound to 127.0.0.1, on a port
that the operating system chose. It is found by torchrun through the `torchrun.handlers` entry point, a documented plug-in place:

    python -m torch.distributed.run --rdzv-backend=d2l_loopback --rdzv-endpoint=FOLDER --rdzv-conf=node=0 ...

FOLDER is where node 0 leaves the port for the other nodes.
"""

import socket
import sys
import time
from pathlib import Path
from typing import Any

NAME = "d2l_loopback"
_PORT_FILE = "rendezvous.port"


def get_handler() -> Any:
    """What the entry point names: torchrun calls it once and keeps what it returns."""
    return create


def create(params: Any) -> Any:
    """Build the handler from torchrun's `RendezvousParameters`: endpoint (a folder) and config `node` (0 hosts the store)."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    node, folder = int(params.config["node"]), Path(params.endpoint)

    class LoopbackRendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return NAME

        def next_rendezvous(self) -> Any:
            if self._store is None:
                options: dict[str, Any] = {
                    "use_libuv": sys.platform != "win32"
                }  # torch for Windows is built without libuv
                if node == 0:
                    listener = socket.create_server(("127.0.0.1", 0))
                    self.master_port = listener.getsockname()[1]
                    if sys.platform == "win32":
                        listener.close()  # a socket handle is no file descriptor there
                    else:
                        options["master_listen_fd"] = listener.detach()
                    publish(folder, self.master_port)
                else:
                    self.master_port = wait_for_port(folder)
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    node == 0,
                    self.timeout,
                    multi_tenant=True,
                    **options,
                )
            return super().next_rendezvous()

    return LoopbackRendezvous("127.0.0.1", 0, node, params.max_nodes, params.run_id, timeout=60)


def publish(folder: Path, port: int) -> None:
    """Leave the port where the other nodes look. Renamed into place, so that nobody reads half a number."""
    draft = folder / f"{_PORT_FILE}.draft"
    draft.write_text(str(port))
    draft.replace(folder / _PORT_FILE)


def wait_for_port(folder: Path, seconds: float = 60.0) -> int:
    """The port that node 0 published in `folder`. TimeoutError when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return int((folder / _PORT_FILE).read_text())
        except FileNotFoundError:
            time.sleep(0.01)
    raise TimeoutError(f"node 0 did not publish its port within {seconds:.0f} s")
