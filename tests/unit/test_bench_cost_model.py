"""The model of all-reduce, and its fit."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allreduce_model import (
    FORECASTS,
    HALVING_DOUBLING,
    RING,
    SHARED_MEMORY,
    TREE,
    Hosts,
    Link,
    crowding,
    fit_two,
    seconds,
)
from benchmarks.cost_model import (
    COMMAND,
    FORECAST_RANKS,
    CostModelReport,
    CostModelSpec,
    cost_tables,
    fit_contender,
    forecast,
)
from paceline.bench.results import Circumstances
from paceline.bench.tables import render
from paceline.errors import UsageError

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


@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_two_terms_are_found_again(alpha: float, beta: float) -> None:
    rows = [(u, v, alpha * u + beta * v) for u, v in [(2.0, 1e3), (4.0, 1e5), (2.0, 1e7), (6.0, 1e8)]]
    found_alpha, found_beta = fit_two(rows)
    for u, v, t in rows:
        assert found_alpha * u + found_beta * v == pytest.approx(t, rel=1e-3)


def test_neither_term_becomes_negative() -> None:
    # More bytes took less time: only messages can explain something.
    assert fit_two([(2.0, 1e3, 2.0), (2.0, 1e6, 1.0)])[1] == 0.0
    alpha, beta = fit_two([(1.0, 10.0, 1.0), (2.0, 10.0, 1.0)])
    assert alpha == 0.0
    assert beta == pytest.approx(0.1)


@pytest.mark.parametrize("settings", [{"fit_ranks": "1,2"}, {"sizes": "4KiB,8KiB"}, {"rounds": 0}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CostModelSpec(**settings)


def cost_report() -> CostModelReport:
    spec = CostModelSpec()
    measured = [
        (ranks, 1 << power, 1e-4 * ranks + 2.0**power / 1e9) for ranks in (2, 3, 4) for power in (14, 16, 18, 20)
    ]
    fit, points = fit_contender("gloo", RING, measured, spec, 2)
    return CostModelReport(
        asdict(spec), Circumstances.now(), [fit], points, forecast(spec, Link(1e-6, 1e-10)), ["links are equal"]
    )


def test_the_tables_show_the_fit_the_points_and_the_forecast() -> None:
    text = "\n".join(render(table) for table in cost_tables(cost_report()))
    assert "10,000" in text and "assumed: links are equal" in text and "checked" in text and "fitted" in text


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")
@pytest.mark.usefixtures("fonts")
def test_the_chart_is_drawn_from_json(tmp_path: Path) -> None:
    COMMAND.chart(json.loads(json.dumps(asdict(cost_report())))).savefig(tmp_path / "chart.png")
    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
