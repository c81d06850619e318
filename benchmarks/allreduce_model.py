"""What an all-reduce must cost, by algorithm: T = α · messages + β · bytes.

Messages are those that follow one another; bytes are those that one rank sends (or, in shared memory, moves).

    ring               2(n−1) messages            2(n−1)/n · B bytes
    halving-doubling   2·log2 n                   2(n−1)/n · B
    tree               2·log2 n                   2·log2 n · B         reduce, then broadcast, not pipelined
    shared memory      2(n−1) signals             2(n−1)/n · B         read the own shard of all, write it to all

On one machine, ranks beyond its cores take turns: bytes take n / cores as long, and a message waits for the turn of
who is to get it, which is another α.

Over hosts with g ranks each, h = n/g of them, every link between hosts is shared by the ranks of its host:

    ring               every message is as slow as the slowest link
    halving-doubling   neighbours first: log2 g rounds inside the host, then log2 h between hosts
    tree               likewise
    two levels         shared memory inside the host; then each rank takes its shard around a ring over the hosts
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How often messages follow one another, and what part of the bytes a rank sends, by number of ranks."""

    name: str
    messages: Callable[[int], float]
    share: Callable[[int], float]


def _log2(n: int) -> float:
    return float(math.ceil(math.log2(n)))


def _twice_all_but_own(n: int) -> float:
    return 2 * (n - 1) / n


RING = Algorithm("ring", lambda n: 2.0 * (n - 1), _twice_all_but_own)
HALVING_DOUBLING = Algorithm("halving-doubling", lambda n: 2 * _log2(n), _twice_all_but_own)
TREE = Algorithm("tree", lambda n: 2 * _log2(n), lambda n: 2 * _log2(n))
SHARED_MEMORY = Algorithm("shared memory", lambda n: 2.0 * (n - 1), _twice_all_but_own)


@dataclass(frozen=True, slots=True)
class Link:
    """α and β of one kind of connection."""

    alpha_s: float
    beta_s_per_byte: float


def crowding(ranks: int, cores: int) -> float:
    """By how much ranks that share the cores of one host slow each other down."""
    return max(1.0, ranks / cores)


def seconds(algorithm: Algorithm, link: Link, ranks: int, nbytes: float, crowd: float = 1.0) -> float:
    """The time of one all-reduce."""
    if ranks == 1:
        return 0.0
    messages, share = algorithm.messages(ranks), algorithm.share(ranks)
    return link.alpha_s * messages + crowd * link.beta_s_per_byte * share * nbytes


@dataclass(frozen=True, slots=True)
class Cost:
    """One all-reduce: its time, the messages that follow one another, and the bytes that one rank sends."""

    seconds: float
    messages: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Hosts:
    """Where ranks live: `ranks` of them, `per_host` on each host, and the links inside and between hosts."""

    ranks: int
    per_host: int
    inside: Link
    between: Link

    @property
    def local(self) -> int:
        return min(self.per_host, self.ranks)

    @property
    def count(self) -> int:
        return math.ceil(self.ranks / self.local)


def ring_cost(hosts: Hosts, nbytes: float) -> Cost:
    link = hosts.inside
    if hosts.count > 1:
        link = Link(max(link.alpha_s, hosts.between.alpha_s), max(link.beta_s_per_byte, hosts.between.beta_s_per_byte))
    return Cost(seconds(RING, link, hosts.ranks, nbytes), RING.messages(hosts.ranks), RING.share(hosts.ranks) * nbytes)


def halving_doubling_cost(hosts: Hosts, nbytes: float) -> Cost:
    # After the rounds inside a host its ranks hold shards that together are the whole buffer.
    took = seconds(HALVING_DOUBLING, hosts.inside, hosts.local, nbytes)
    took += seconds(HALVING_DOUBLING, hosts.between, hosts.count, nbytes)
    messages = HALVING_DOUBLING.messages(hosts.local) + HALVING_DOUBLING.messages(hosts.count)
    return Cost(took, messages, HALVING_DOUBLING.share(hosts.ranks) * nbytes)


def tree_cost(hosts: Hosts, nbytes: float) -> Cost:
    took = seconds(TREE, hosts.inside, hosts.local, nbytes) + seconds(TREE, hosts.between, hosts.count, nbytes)
    messages = TREE.messages(hosts.local) + TREE.messages(hosts.count)
    return Cost(took, messages, messages * nbytes)


def two_level_cost(hosts: Hosts, nbytes: float) -> Cost:
    took = seconds(SHARED_MEMORY, hosts.inside, hosts.local, nbytes) + seconds(RING, hosts.between, hosts.count, nbytes)
    messages = SHARED_MEMORY.messages(hosts.local) + RING.messages(hosts.count)
    sent = SHARED_MEMORY.share(hosts.local) * nbytes + RING.share(hosts.count) * nbytes / hosts.local
    return Cost(took, messages, sent)


FORECASTS: dict[str, Callable[[Hosts, float], Cost]] = {
    "ring": ring_cost,
    "halving-doubling": halving_doubling_cost,
    "tree": tree_cost,
    "two levels": two_level_cost,
}


def fit_two(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """α and β, neither negative, of t = α·u + β·v for rows (u, v, t): least squares of relative errors."""
    uu = uv = vv = us = vs = 0.0
    for u, v, t in rows:
        u, v = u / t, v / t
        uu, uv, vv, us, vs = uu + u * u, uv + u * v, vv + v * v, us + u, vs + v
    det = uu * vv - uv * uv
    if det > 1e-12 * uu * vv:
        alpha, beta = (us * vv - vs * uv) / det, (vs * uu - us * uv) / det
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # One of the two explains nothing; the other alone explains best.
    only_alpha, only_beta = us / uu, vs / vv
    left_alpha = sum((only_alpha * u / t - 1) ** 2 for u, _, t in rows)
    left_beta = sum((only_beta * v / t - 1) ** 2 for _, v, t in rows)
    return (only_alpha, 0.0) if left_alpha < left_beta else (0.0, only_beta)
