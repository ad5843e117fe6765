"""How the torchrun agents of one launch find each other when they all live on this host: over loopback, and only there.

torchrun's own rendezvous listens on every network interface, and whoever reaches that port can run code in the agent
(its values are unpickled). This handler is torchrun's static rendezvous with its store on a socket bound to
127.0.0.1, on a port that the operating system chose. torchrun finds it through the `torchrun.handlers` entry point, a
documented plug-in place:

    python -m torch.distributed.run --rdzv-backend=d2l_loopback --rdzv-endpoint=FOLDER --rdzv-conf=node=0,host=1 ...

FOLDER is where whoever hosts the store leaves its port for the others. A cold launch has node 0's agent host it. A warm
one has the supervisor: there the agents fork their ranks, and a fork should not happen beside the store's own thread,
which may hold a lock of the C library at that very moment; a rank that then looks up an address would wait for ever.
"""

import socket
import sys
import time
from pathlib import Path
from typing import Any

NAME = "d2l_loopback"
_PORT_FILE = "rendezvous.port"
_LIBUV = sys.platform != "win32"  # torch for Windows is built without it


def get_handler() -> Any:
    """What the entry point names: torchrun calls it once and keeps what it returns."""
    return create


def create(params: Any) -> Any:
    """Build the handler from torchrun's `RendezvousParameters`: endpoint (FOLDER), config `node` and `host` (1: be it)."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    node, hosting, folder = int(params.config["node"]), params.config["host"] == "1", Path(params.endpoint)

    class LoopbackRendezvous(StaticTCPRendezvous):
        life = 0

        def get_backend(self) -> str:
            return NAME

        def next_rendezvous(self) -> Any:
            # A store for each life of the ranks: they would take what the life before left in it for each other's.
            if hosting:
                store = host(folder, self.life)
                self._store, self.master_port = store, store.port
            else:
                self.master_port = wait_for_port(folder, self.life)
                self._store = TCPStore(
                    self.master_addr, self.master_port, is_master=False, timeout=self.timeout, use_libuv=_LIBUV
                )
            self.life += 1
            return super().next_rendezvous()

    return LoopbackRendezvous("127.0.0.1", 0, node, params.max_nodes, params.run_id, timeout=60)


def host(folder: Path, life: int = 0) -> Any:
    """Host a launch's store for one life of its ranks on a loopback port of the system's choice; leave the port in `folder`."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        listener.close()  # a socket handle is no file descriptor there
    else:
        options["master_listen_fd"] = listener.detach()
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True, use_libuv=_LIBUV, **options
    )
    publish(folder, port, life)
    return store


def publish(folder: Path, port: int, life: int = 0) -> None:
    """Leave the port where the others look. Renamed into place, so that nobody reads half a number."""
    file = folder / f"{_PORT_FILE}{life}"
    draft = file.with_suffix(".draft")
    draft.write_text(str(port))
    draft.replace(file)


def wait_for_port(folder: Path, life: int = 0, seconds: float = 60.0) -> int:
    """The port that the host published in `folder`. TimeoutError when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return int((folder / f"{_PORT_FILE}{life}").read_text())
        except FileNotFoundError:
            time.sleep(0.005)
    raise TimeoutError(f"the store's port was not published within {seconds:.0f} s")
