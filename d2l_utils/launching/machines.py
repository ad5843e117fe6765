"""What a rank needs when plain torchrun started it on one of several machines: the right network, and a word when a machine is gone.

Neither is needed on one machine, and `launch` uses neither. A machine that loses its power or its cable says nothing: who waits
for it in a collective waits for PyTorch's own limit, half an hour with gloo. So every rank counts up a number of its node in the
store through which the ranks met, and the first rank of each node looks whether the others' numbers still move. A node is judged
by numbers that move, never by clocks, which differ between machines; and a rank that only computes for long is not missed.

Environment: D2L_NODE_TIMEOUT, the seconds after which a silent machine is taken for gone (60).
"""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

_FINISHED = 1 << 40  # added to a node's number when it has finished, and need not be waited for


def several(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started ranks on other nodes too. What one machine simulates (`launch`) has its own ways."""
    local = environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])
    return "D2L_RUN_FOLDER" not in environ and int(local) < int(environ["WORLD_SIZE"])


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Around a rank's work: gloo on the network that leads to the other machines, and an eye on these."""
    if not several(os.environ):
        yield
        return
    limit = node_timeout(os.environ)
    name = interface(os.environ["MASTER_ADDR"])
    if name:  # gloo's own choice is where the host name points: on Debian and Ubuntu, to the machine itself
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    watch = Watch(os.environ, limit)
    try:
        yield
        watch.finished = True
    finally:
        watch.end()


def node_timeout(environ: Mapping[str, str]) -> float:
    """Seconds of silence after which a machine is taken for gone. ValueError for anything but a number above 0."""
    text = environ.get("D2L_NODE_TIMEOUT", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"D2L_NODE_TIMEOUT is {text!r}: allowed is a number of seconds above 0")
    return seconds


def interface(address: str) -> str | None:
    """The network interface from which this machine reaches `address`, a name or number; None where it cannot be told."""
    import psutil

    own = _own_address(address)
    if own is not None and _is_loopback(own) and not _is_loopback(address) and address != "localhost":
        own = _own_address("192.0.2.1")  # this machine's own name means itself here: take the way to anywhere else
    for name, addresses in psutil.net_if_addrs().items():
        if own is not None and any(a.address.partition("%")[0] == own for a in addresses):
            return name
    return None


def _own_address(address: str) -> str | None:
    """The address that packets to `address` would carry as their sender. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class Watch:
    """This rank's part in watching the machines: it counts up its node's number, and its node's first rank reads the others'.

    Two threads, since an answer over a cut network may never come: one asks, the other looks at the clock.
    """

    def __init__(self, environ: Mapping[str, str], limit: float) -> None:
        self.limit, self.period = limit, min(2.0, limit / 4)
        self.node, self.first = int(environ["GROUP_RANK"]), environ["LOCAL_RANK"] == "0"
        self.rank, self.local_size = int(environ["RANK"]), int(environ["LOCAL_WORLD_SIZE"])
        self.nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
        self.meeting = (environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        self.prefix = f"d2l/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/node"
        self.finished, self.over = False, threading.Event()
        self.answered: float | None = None  # when the store answered last
        self.seen: dict[int, tuple[int, float]] = {}  # by node: its number, and since when it has stood still
        self.names: dict[int, str] = {}
        self.asking = threading.Thread(target=self._ask, daemon=True, name="d2l-machines")
        self.asking.start()
        if self.first:
            threading.Thread(target=self._look, daemon=True, name="d2l-clock").start()

    def end(self) -> None:
        """Say that this node need not be waited for, if the work was done; and stop."""
        self.over.set()
        self.asking.join(self.period)

    def _ask(self) -> None:
        from torch.distributed import TCPStore

        with contextlib.suppress(Exception):  # the other thread tells of a store that does not answer
            store = TCPStore(*self.meeting, is_master=False, timeout=timedelta(minutes=5))
            if self.first:
                last = self.rank + self.local_size - 1
                ranks = f"rank {self.rank}" if last == self.rank else f"ranks {self.rank} to {last}"
                store.set(f"{self.prefix}/{self.node}/name", f"{socket.gethostname()}, {ranks}")
            while not self.over.is_set():
                store.add(f"{self.prefix}/{self.node}", 1)
                if self.first:
                    self._read(store)
                self.answered = time.monotonic()
                self.over.wait(self.period)
            if self.first and self.finished:
                store.add(f"{self.prefix}/{self.node}", _FINISHED)

    def _read(self, store: Any) -> None:
        for node in range(self.nodes):
            number = store.add(f"{self.prefix}/{node}", 0)
            if number and self.seen.get(node, (0, 0.0))[0] != number:
                self.seen[node] = (number, time.monotonic())
            name = f"{self.prefix}/{node}/name"
            if node not in self.names and store.check([name]):
                self.names[node] = store.get(name).decode()

    def silent(self, now: float) -> str | None:
        """Who has not been heard of for too long, in words; None while all is well. A node is missed once it was there."""
        if self.answered is not None and now - self.answered > self.limit:
            return f"{self.meeting[0]}, where the ranks meet,"
        for node, (number, since) in list(self.seen.items()):  # the other thread adds to it
            if node != self.node and number < _FINISHED and now - since > self.limit:
                return f"node {node} ({self.names.get(node, 'name unknown')})"
        return None

    def _look(self) -> None:
        while not self.over.wait(self.period / 2):
            if who := self.silent(time.monotonic()):
                self._leave(
                    f"{who} has not answered for {self.limit:g} s: that machine is gone, or the network to it. "
                    f"Rank {self.rank} ends, and with it the ranks of this node"
                )

    def _leave(self, text: str) -> None:
        """End this rank, which may be deep in a collective; torchrun then ends its neighbours and repeats the reason."""
        print(f"[rank {self.rank}] {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise ConnectionError(text)
            except ConnectionError as error:
                get_error_handler().record_exception(error)
        os._exit(1)
