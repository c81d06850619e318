"""The model of all-reduce, and its fit."""

import pytest

from paceline.bench.cost_model import (
    FORECASTS,
    HALVING_DOUBLING,
    RING,
    SHARED_MEMORY,
    TREE,
    Hosts,
    Link,
    crowding,
    seconds,
)
from paceline.bench.cost_study import FORECAST_RANKS, fit_contender, forecast
from paceline.bench.spec import CostModelSpec

FAST = Link(1e-6, 1e-10)
NETWORK = Link(10e-6, 1e-9)
MIB = 1 << 20


def test_two_ranks_in_a_ring() -> None:
    assert seconds(RING, Link(1.0, 0.0), 2, MIB) == 2.0
    assert seconds(RING, Link(0.0, 1.0), 2, MIB) == MIB


def test_messages_and_bytes_of_eight_ranks() -> None:
    assert [algorithm.messages(8) for algorithm in (RING, HALVING_DOUBLING, TREE, SHARED_MEMORY)] == [14, 6, 6, 14]
    assert [algorithm.share(8) for algorithm in (RING, HALVING_DOUBLING, TREE)] == [1.75, 1.75, 6]


def test_a_world_of_one_costs_nothing() -> None:
    assert seconds(RING, NETWORK, 1, MIB) == 0.0
    for cost_of in FORECASTS.values():
        assert cost_of(Hosts(1, 8, FAST, NETWORK), MIB).seconds == 0.0


def test_ranks_beyond_the_cores_take_turns() -> None:
    assert [crowding(ranks, 2) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 4]
    both, starts = seconds(RING, FAST, 4, MIB), seconds(RING, FAST, 4, 0)
    assert seconds(RING, FAST, 4, MIB, crowding(4, 2)) == pytest.approx(starts + 2 * (both - starts))


def test_two_levels_on_one_host_are_shared_memory() -> None:
    cost = FORECASTS["two levels"](Hosts(8, 8, FAST, NETWORK), MIB)
    assert cost.seconds == seconds(SHARED_MEMORY, FAST, 8, MIB)
    assert cost.messages == 14


def test_between_hosts_two_levels_send_fewer_messages_than_a_ring() -> None:
    hosts = Hosts(64, 8, FAST, NETWORK)
    ring, two = FORECASTS["ring"](hosts, MIB), FORECASTS["two levels"](hosts, MIB)
    assert two.messages == 14 + 14
    assert ring.messages == 126
    assert two.seconds < ring.seconds
    # Bytes per host are the same: eight ranks send an eighth each.
    assert two.sent_bytes == pytest.approx(1.75 * MIB + 1.75 * MIB / 8)


def test_more_ranks_never_cost_less() -> None:
    spec = CostModelSpec()
    found = forecast(spec, FAST)
    assert {point.ranks for point in found} == set(FORECAST_RANKS)
    assert max(FORECAST_RANKS) == 10_000
    for name in FORECASTS:
        times = [point.seconds for point in found if point.algorithm == name]
        assert times == sorted(times)


def test_the_fit_finds_alpha_and_beta_and_predicts_points_it_has_not_seen() -> None:
    spec = CostModelSpec(fit_ranks="2,4", check_ranks="3,8")
    link, cores = Link(20e-6, 0.5e-9), 2
    measured = [
        (ranks, nbytes, seconds(RING, link, ranks, nbytes, crowding(ranks, cores)))
        for ranks in (2, 3, 4, 8)
        for nbytes in (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
    ]
    fit, points = fit_contender("gloo", RING, measured, spec, cores)
    assert fit.alpha_s == pytest.approx(link.alpha_s, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(link.beta_s_per_byte, rel=1e-6)
    assert fit.checked_error == pytest.approx(0.0, abs=1e-6)
    fitted = {(point.ranks, point.nbytes) for point in points if point.fitted}
    assert fitted == {(ranks, nbytes) for ranks in (2, 4) for nbytes in (1 << 14, 1 << 18, 1 << 22)}
    assert len(points) == len(measured)
