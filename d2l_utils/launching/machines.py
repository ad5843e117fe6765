"""What a rank needs when plain torchrun started it on one of several machines: the right network, and a word when a machine is gone.

Neither is needed on one machine, and `launch` uses neither. A machine that loses its power or its cable says nothing: who waits
for it in a collective waits until the network gives up, after a quarter of an hour, or gloo does, after half an hour. So every
rank counts up a number of its node in the store through which the ranks met, and the first rank of each node looks whether the
others' numbers still move. A node is judged by numbers that move, never by clocks, which differ between machines; and a rank that
only computes for long is not missed.

Environment: D2L_NODE_TIMEOUT, the seconds after which a silent machine is taken for gone (60).
"""

import contextlib
import ipaddress
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
    """Whether torchrun started ranks on other nodes too, and keeps the store through which they meet (as it does by default)."""
    local = environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])
    plain = "D2L_RUN_FOLDER" not in environ  # what one machine simulates under `launch` has its own ways
    return plain and int(local) < int(environ["WORLD_SIZE"]) and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Around a rank's work: gloo and NCCL on the network that leads to the other machines, and an eye on these."""
    if not several(os.environ):
        yield
        return
    from torch.distributed import TCPStore

    limit, place = node_timeout(os.environ), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = TCPStore(*place, is_master=False, timeout=timedelta(minutes=5))
    if name := interface(store, os.environ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    watch = Watch(store, os.environ, limit)
    try:
        yield
        watch.finished = True
    finally:
        watch.end()


def key(environ: Mapping[str, str], node: int, what: str) -> str:
    """Where the store keeps a fact of a node. A group that torchrun has restarted starts anew."""
    return f"d2l/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/node{node}/{what}"


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


def interface(store: Any, environ: Mapping[str, str]) -> str | None:
    """The network interface that leads from this machine to the others; None where it cannot be told.

    gloo by itself takes the one that the host's own name points to, which on Debian and Ubuntu is the loopback. It is the one
    that leads to where the ranks meet, or, on the machine where they meet, to another node.
    """
    import psutil

    node = int(environ["GROUP_RANK"])
    own = own_address(environ["MASTER_ADDR"])
    if environ["LOCAL_RANK"] == "0":
        store.set(key(environ, node, "address"), own or "")
    if own and ipaddress.ip_address(own).is_loopback:
        own = own_address(store.get(key(environ, int(node == 0), "address")).decode())
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == own for a in addresses):
            return name
    return None


def own_address(address: str) -> str | None:
    """The address that packets to `address` would carry as their sender. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


class Watch:
    """This rank's part in watching the machines: it counts up its node's number, and its node's first rank reads the others'.

    Two threads, since an answer over a cut network may never come: one asks, the other looks at the clock.
    """

    def __init__(self, store: Any, environ: Mapping[str, str], limit: float) -> None:
        self.store, self.environ = store, dict(environ)  # a copy: the rank's function may change it
        self.limit, self.period = limit, min(2.0, limit / 4)
        self.node, self.first = int(environ["GROUP_RANK"]), environ["LOCAL_RANK"] == "0"
        self.rank, self.local_size = int(environ["RANK"]), int(environ["LOCAL_WORLD_SIZE"])
        self.nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
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
        with contextlib.suppress(Exception):  # the other thread tells of a store that does not answer
            if self.first:
                last = self.rank + self.local_size - 1
                ranks = f"rank {self.rank}" if last == self.rank else f"ranks {self.rank} to {last}"
                self.store.set(self._key(self.node, "name"), f"{socket.gethostname()}, {ranks}")
            while not self.over.is_set():
                self.store.add(self._key(self.node, "number"), 1)
                if self.first:
                    self._read()
                self.answered = time.monotonic()
                self.over.wait(self.period)
            if self.first and self.finished:
                self.store.add(self._key(self.node, "number"), _FINISHED)

    def _key(self, node: int, what: str) -> str:
        return key(self.environ, node, what)

    def _read(self) -> None:
        for node in range(self.nodes):
            number = self.store.add(self._key(node, "number"), 0)
            if number and self.seen.get(node, (0, 0.0))[0] != number:
                self.seen[node] = (number, time.monotonic())
            if node not in self.names and self.store.check([self._key(node, "name")]):
                self.names[node] = self.store.get(self._key(node, "name")).decode()

    def silent(self, now: float) -> str | None:
        """Who has not been heard of for too long, in words; None while all is well. A node is missed once it was there."""
        if self.answered is not None and now - self.answered > self.limit:
            return f"{self.environ['MASTER_ADDR']}, where the ranks meet,"
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
        print(f"[rank {self.rank}] {text}\n", end="", file=sys.stderr, flush=True)  # in one piece
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise ConnectionError(text)
            except ConnectionError as error:
                get_error_handler().record_exception(error)
        os._exit(1)
