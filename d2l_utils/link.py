"""A pretended link: how long a collective would keep one busy, from its logical bytes. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from d2l_utils.traffic import hops_on_ring, sent_on_ring

__all__ = ["Carrier", "Link"]


class Carrier(Protocol):
    """Whatever knows how long a collective would keep it busy: a link, or a cluster's."""

    def seconds(self, name: str, payload: int, group_size: int) -> float: ...


@dataclass(frozen=True)
class Link:
    """What one rank sends through, shared with nobody.

    bandwidth : bytes a second that the rank can send. latency : seconds that each hop of a message takes.
    Raises ValueError for a bandwidth that is not above 0, or a latency that is below 0.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("bandwidth", "above 0 bytes a second"), ("latency", "at least 0 seconds")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            if not number or value < 0 or (name == "bandwidth" and value == 0) or (name == "latency" and value > 1e6):
                raise ValueError(f"{name} is {value!r}: it must be a number {allowed}")

    def seconds(self, name: str, payload: int, group_size: int) -> float:
        """Seconds that a collective keeps the link busy: bytes on an ideal ring / bandwidth + hops x latency.

        Arguments are those of an ``Event``: the payload is the whole tensor, in bytes. Raises ValueError for an
        operation without a known figure.
        """
        sent, hops = sent_on_ring(name, payload, group_size), hops_on_ring(name, group_size)
        if sent is None or hops is None:
            raise ValueError(f"name is {name!r}: nothing is known about what it sends")
        return sent / self.bandwidth + hops * self.latency
