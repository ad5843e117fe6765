"""Bytes that one rank sends for a collective: by an ideal ring, and by the algorithm that gloo really uses.

Both follow from the measured payload, the number of ranks and the operation; neither looks at the network.
``Recording.wire_bytes`` does, and the tests hold the sum of gloo's figures against it.
"""

from __future__ import annotations

# Sent per rank, in payloads, by one of n ranks on a ring. Where ranks send different amounts (the root of a
# broadcast sends, the last of the chain does not), it is the mean over the ranks, so that ranks x figure is
# the whole traffic.
_RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
    "barrier": lambda n: 0.0,
}


# Messages that follow one another on that ring, each of which a link's latency delays.
_HOPS = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "reduce": lambda n: n - 1,
    "gather": lambda n: n - 1,
    "scatter": lambda n: n - 1,
    "send": lambda n: 1,
    "recv": lambda n: 0,
    "barrier": lambda n: 2 * (n - 1),
}


def hops_on_ring(name: str, group_size: int) -> int | None:
    """Messages that follow one another on an ideal ring: 2(N-1) for an all-reduce, N-1 for its halves."""
    return _HOPS[name](group_size) if name in _HOPS else None


def sent_on_ring(name: str, payload: int | None, group_size: int | None) -> float | None:
    """Bytes one rank sends on an ideal ring: 2(N-1)/N payloads for an all-reduce, (N-1)/N for its two halves.

    Arguments are those of an ``Event``: the payload is the whole tensor. None where an argument is, or for an
    operation without a known figure.
    """
    if payload is None or group_size is None or name not in _RING:
        return None
    return _RING[name](group_size) * payload


def sent_by_gloo(
    operation: str,
    payload: int | None,
    group_size: int | None,
    rank: int | None = None,
    root: int | None = None,
) -> float | None:
    """Bytes this rank sends when gloo runs ``operation``, by gloo's name, on a whole tensor of ``payload`` bytes.

    gloo has no reduce-scatter: PyTorch runs an all-reduce and keeps a part, 2(N-1)/N payloads instead of
    (N-1)/N, which is why the operation has to be gloo's. Its broadcast is a binomial tree, so it depends on
    ``rank`` and ``root`` (ranks in the group). None where that is not known, or for an operation that is not
    listed here.
    """
    if payload is None or group_size is None:
        return None
    if operation in ("all_reduce", "all_gather", "all_to_all", "send", "recv", "barrier"):
        return sent_on_ring(operation, payload, group_size)
    if rank is None or root is None:
        return None
    if operation == "broadcast":
        place = (rank - root) % group_size
        return float(payload * _children(place, group_size))
    if operation == "reduce":  # a reduce-scatter on the ring, then everyone sends its part to the root
        return payload * (group_size - 1) / group_size if rank == root else float(payload)
    if operation == "gather":  # everyone sends its part straight to the root
        return 0.0 if rank == root else payload / group_size
    if operation == "scatter":
        return payload * (group_size - 1) / group_size if rank == root else 0.0
    return None


def _children(place: int, group_size: int) -> int:
    """How many ranks the ``place``-th passes the tensor to in a binomial tree: in round i, 2**i have it."""
    reach, children = 1, 0
    while reach < group_size:
        if place < reach and place + reach < group_size:
            children += 1
        reach *= 2
    return children
