"""Machines to train on, and what a collective takes on them: bytes over bandwidth, and hops times latency.

    >>> Machines(between=50).seconds("all_gather", 2 * 10**9, group_size=64)

Bytes: a ring over all ranks leaves each node through one border, so across nodes it goes at the slower of the two
bandwidths. Hops: those of NCCL's own model of a collective (github.com/NVIDIA/nccl, src/graph/tuning.cc). A ring of
N ranks on m nodes has N - 1 for each half of an all-reduce, m - 1 of them from node to node. A tree has a chain in each
node, and log2(m) levels between them. The same latencies are taken for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chapter19_9.choosing.presets import number, whole
from d2l_utils.traffic import hops_on_ring, sent_on_ring

ALGORITHMS = ("nccl", "ring", "tree")


@dataclass(frozen=True)
class Machines:
    """Nodes of equal devices, and the links inside and between them. The defaults, with their sources:

    devices         : in a node.
    inside          : GB/s (1e9 bytes) that a device sends to another in its node. H100: NVLink has 900 both ways together.
    between         : GB/s that leave a node, by all its links. 400 Gb/s for each of 8 (Llama 3, arXiv 2407.21783, 3.3.1).
    latency_inside  : microseconds of a hop in a node. NCCL's src/graph/tuning.cc: a ring over NVLink with LL128.
    latency_between : microseconds of a hop from node to node. As before, over the network.
    teraflops       : 1e12 operations a second that a device does when it only computes. 400 is the middle of what Llama 3
                      saw in whole steps (its table 4: 380 to 430); H100's data sheet promises 989.
    algorithm       : "ring"; "tree"; or "nccl", as NCCL chooses: the faster of both for an all-reduce, else a ring.

    An infinite bandwidth or rate and a latency of 0 are allowed. Raises ValueError that names the field.
    """

    devices: int = 8
    inside: float = 450.0
    between: float = 400.0
    latency_inside: float = 1.9
    latency_between: float = 4.0
    teraflops: float = 400.0
    algorithm: str = "nccl"

    def __post_init__(self) -> None:
        whole("devices", self.devices, 1)
        for name in ("inside", "between", "teraflops"):
            number(name, getattr(self, name), zero=False)
        for name in ("latency_inside", "latency_between"):
            number(name, getattr(self, name), zero=True)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is {self.algorithm!r}: it must be one of {', '.join(ALGORITHMS)}")

    def nodes(self, n: int) -> int:
        return -(-n // self.devices)

    def bandwidth(self, n: int) -> float:
        """Bytes a second of a ring over n ranks."""
        return 1e9 * (self.inside if self.nodes(n) == 1 else min(self.inside, self.between))

    def hops(self, name: str, n: int, algorithm: str) -> tuple[int, int]:
        """Hops that follow one another: in nodes, and from node to node."""
        nodes, all_hops = self.nodes(n), hops_on_ring(name, n)
        if all_hops is None:
            raise ValueError(f"name is {name!r}: nothing is known about its hops")
        if n == 1:
            return 0, 0
        halves = all_hops // (n - 1)  # 2 for an all-reduce, 1 for each of its halves
        if algorithm == "tree":
            return halves * (min(n, self.devices) - 1), halves * math.ceil(math.log2(nodes))
        return halves * (n - nodes), halves * (nodes - 1)

    def latency(self, name: str, n: int) -> float:
        """Seconds that a collective takes however little it sends."""
        ways = {"nccl": ("ring", "tree") if name == "all_reduce" else ("ring",)}.get(self.algorithm, (self.algorithm,))
        each = [self.hops(name, n, way) for way in ways]
        return 1e-6 * min(a * self.latency_inside + b * self.latency_between for a, b in each)

    def seconds(self, name: str, payload: float, group_size: int) -> float:
        """Seconds that a collective keeps a rank's links busy; arguments and errors as in ``d2l_utils.link.Link``."""
        sent = sent_on_ring(name, payload, group_size)  # type: ignore[arg-type]
        return (sent or 0.0) / self.bandwidth(group_size) + self.latency(name, group_size)


H100 = Machines()
