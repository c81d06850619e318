"""What is made of samples: ratios, verdicts, tables, JSON and charts."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hooks_cost
from benchmarks.agreement_cost import AgreementReport, AgreementSpec, agreement_report, agreement_tables
from benchmarks.audits_cost import AuditsSpec, audits_report, audits_tables
from benchmarks.draw import CHARTS, draw
from benchmarks.hooks_cost import HooksReport, HooksRow, HooksSpec, hooks_tables
from benchmarks.lanes_cost import LanesReport, LanesSpec, lanes_report, lanes_tables
from paceline.bench import machinery
from paceline.bench.allreduce import AllReduceReport, AllReduceRow, AllReduceSpec, allreduce_tables, run_allreduce
from paceline.bench.command import conduct, exit_code
from paceline.bench.commands import COMMANDS
from paceline.bench.machinery import MachineryReport, MachineryResult, MachinerySpec, machinery_tables
from paceline.bench.results import Circumstances, dump_json, write_json
from paceline.bench.series import RanksSpec, SeriesReport, series_tables
from paceline.bench.spec import StepSpec
from paceline.bench.statistics import Ratio
from paceline.bench.step_comparison import ContenderResult, StepComparison, compare
from paceline.bench.step_report import step_tables
from paceline.bench.tables import render
from paceline.errors import UsageError
from paceline.memory_plan import plan_chart

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")


PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
STORED = sorted(PEERS.parent.glob("*.json"))
FUSION, TENSORFLOW = f"{PEERS}/horovod_fusion.py:fusion", f"{PEERS}/tensorflow_mirrored.py:tensorflow"
MPI, FABRIC = f"{PEERS}/mpi.py:mpi4py", f"{PEERS}/clients.py:fabric"


def result(label: str, ms: float, losses: list[float], **more: Any) -> ContenderResult:
    samples = [[ms / 1e3, ms / 1e3 * 1.02], [ms / 1e3 * 0.98]]
    made = ContenderResult(label, f"about {label}", ranks=2, samples_s=samples, losses=losses)
    made.median_s, made.p10_s, made.p90_s = ms / 1e3, ms / 1e3 * 0.98, ms / 1e3 * 1.02
    for name, value in more.items():
        setattr(made, name, value)
    return made


def report() -> StepComparison:
    spec = StepSpec(contenders=("floor", "paceline", "torch", FUSION, TENSORFLOW, MPI, FABRIC))
    same = [8.3, 8.2, 8.1]
    contenders = [
        result("floor", 70.0, [8.3, 8.0, 7.5], replicas_equal=False),
        result(
            "paceline",
            75.0,
            same,
            replicas_equal=True,
            overlap=0.8,
            overlap_from="trace",
            phases_s={"forward": 0.02, "backward": 0.05, "optimizer": 0.005},
            bucket_bytes=[21_000_000],
            predicted_exposed_s=0.004,
            traced_exposed_s=0.0045,
            sent_bytes=21_000_000,
            peak_bytes_per_parameter=17.3,
        ),
        result("torch", 97.0, same, replicas_equal=True, communication_s=0.06, overlap_from="alone"),
        result(FUSION, 50.0, [8.3, 8.25, 8.15], replicas_equal=False),
        result(TENSORFLOW, 300.0, [9.0, 9.0, 9.0]),
        ContenderResult(MPI, "", "not installed", "mpi4py: pip install 'paceline[peers]'"),
        ContenderResult(FABRIC, "", "failed", "rank 1: ValueError: no", log="line a\nline b"),
    ]
    made = StepComparison(
        asdict(spec), Circumstances.now(), spec.shape.parameters, spec.shape.gradient_bytes, contenders
    )
    compare(made)
    return made


def found(made: StepComparison, label: str) -> ContenderResult:
    return next(each for each in made.contenders if each.label == label)


def test_ratios_and_time_above_the_floor() -> None:
    made = report()
    ours, theirs = found(made, "paceline"), found(made, "torch")
    assert ours.to_torch is not None and ours.to_torch.value == pytest.approx(75 / 97)
    assert ours.to_floor is not None and ours.to_floor.value == pytest.approx(75 / 70)
    assert ours.above_floor_s == pytest.approx(0.005)
    assert ours.overlap == 0.8, "paceline's own trace is kept"
    assert theirs.overlap == pytest.approx(1 - 27 / 60)
    assert theirs.to_torch is not None and theirs.to_torch.value == 1.0


def test_a_contender_that_computes_something_else_is_seen() -> None:
    made = report()
    assert found(made, "paceline").agrees is True
    assert found(made, "paceline").loss_difference == 0.0
    assert found(made, FUSION).agrees is False
    assert exit_code(made) == 1
    text = render(step_tables(made)[0])
    assert "NO (replicas differ)" in text


def test_equal_losses_of_unequal_replicas_do_not_agree() -> None:
    made = report()
    bad = found(made, FUSION)
    bad.losses = found(made, "torch").losses
    compare(made)
    assert bad.agrees is False


@pytest.mark.parametrize("label", ["floor", TENSORFLOW])
def test_what_cannot_agree_is_not_compared(label: str) -> None:
    assert found(report(), label).agrees is None


def test_without_torch_and_floor_there_are_no_ratios() -> None:
    made = report()
    made.contenders = [each for each in made.contenders if each.label == "paceline"]
    made.contenders[0].to_torch = made.contenders[0].to_floor = None
    compare(made)
    assert made.contenders[0].to_torch is None
    assert "–" in render(step_tables(made)[0])
    assert exit_code(made) == 0


def test_the_table_says_all_that_was_found() -> None:
    text = render(step_tables(report())[0])
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for word in ("75.0", "0.773", "1.071", "5.00", "80%", "20 MiB", "17.3", "yes"):
        assert word in rows["paceline"], word
    assert "mpi4py: not installed: mpi4py: pip install 'paceline[peers]'" in text
    assert "fabric: failed: rank 1: ValueError: no" in text
    assert "    | line b" in text
    assert "exposed by plan 4.00, by trace 4.50 ms" in text
    assert "optimizer 5.00 ms; 1 bucket\n" in text
    assert text.count("above floor ms") == 1 and "exposed ms" not in text
    assert "torch" in text.splitlines()[-1]


def test_the_json_has_hardware_versions_date_command_and_every_sample(tmp_path: Path) -> None:
    made = report()
    write_json(made, tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == "paceline-bench-step/3"
    assert data.keys() == {"schema", "spec", "circumstances", "parameters", "gradient_bytes", "contenders"}
    where = data["circumstances"]
    assert where.keys() == {"date", "command", "hardware", "versions"}
    assert where["hardware"].keys() == {"cpu", "cores", "memory_bytes", "system", "gpu"}
    assert where["hardware"]["memory_bytes"] > 0
    assert {"python", "torch", "paceline"} <= where["versions"].keys()
    ours = data["contenders"][1]
    assert ours["samples_s"] == made.contenders[1].samples_s
    assert ours["to_torch"].keys() == {"value", "low", "high"}
    assert StepSpec(**{**data["spec"], "contenders": tuple(data["spec"]["contenders"])}).model == "gpt-5m"


def test_json_has_one_line_per_array_of_samples() -> None:
    rounds = [[0.1, 1e-9, 3.0], [0.25]] * 20
    value: dict[str, Any] = {
        "samples_s": rounds,
        "by_count": {250: [[0.5]]},
        "text": 'a "quoted" é\n',
        "nothing": None,
        "empty": [[], {}],
        "points": [(1, {"ok": True})],
    }
    text = dump_json(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    assert f'\n "samples_s": {json.dumps(rounds)},\n' in text
    assert text.count("\n") == 2 + len(value)
    made = dump_json(asdict(report()))
    assert json.loads(made) == json.loads(json.dumps(asdict(report()) | {"circumstances": None})) | {
        "circumstances": json.loads(made)["circumstances"]
    }


def test_stored_results_have_one_line_per_array_of_samples() -> None:
    assert STORED
    for file in STORED:
        text = file.read_text()
        assert dump_json(json.loads(text)) == text, file.name


def allreduce_report() -> AllReduceReport:
    rows = [
        AllReduceRow(label, nbytes, [[took]], took, took * 0.9, took * 1.2)
        for nbytes in (4096, 65536, 1 << 20)
        for label, took in (("paceline", 1e-5 + nbytes / 6e9), ("gloo", 3e-4 + nbytes / 1.2e9))
    ]
    return AllReduceReport(asdict(AllReduceSpec()), Circumstances.now(), rows, {"mpi": "not installed"}, "ShmTransport")


def hooks_report() -> HooksReport:
    rows = [
        HooksRow("paceline", 1, [250, 1000], [0.001, 0.004], [0.002, 0.008], 4e-6, 0.0),
        HooksRow("torch", 2, [250, 1000], [0.001, 0.004], [0.003, 0.012], 8e-6, 0.001),
        HooksRow("paceline", 2, [250, 1000], [0.001, 0.004], [0.002, 0.009], 5e-6, 0.0, Ratio(0.75, 0.70, 0.81)),
    ]
    return HooksReport(asdict(HooksSpec()), Circumstances.now(), rows, {}, {"torch@1": "rank 0: gone"})


def machinery_report() -> MachineryReport:
    times = {"bare": 20.0, "bare (A/A)": 20.2, "torch": 21.0, "paceline": 22.0, "no-agreement": 21.5}
    contenders = [
        MachineryResult(label, "", samples_s=[[ms / 1e3], [ms / 1e3 * 1.1]], losses=[8.0, 7.9])
        for label, ms in times.items()
    ]
    contenders.append(MachineryResult("paceline@../before", "", "failed", "rank 0: ImportError: no", "line a"))
    made = MachineryReport(asdict(MachinerySpec()), Circumstances.now(), 5_300_000, 100, contenders)
    machinery.compare(made, 1e-4)
    return made


def test_what_the_machinery_adds_is_told_beside_the_noise() -> None:
    made = machinery_report()
    ours = next(result for result in made.contenders if result.label == "paceline")
    assert ours.to_bare is not None and ours.to_bare.value == pytest.approx(1.1)
    assert ours.added_per_tensor_s == pytest.approx(2.1e-3 / 100)
    assert ours.agrees is True and ours.loss_difference == 0.0
    text = render(machinery_tables(made)[0])
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["bare (A/A)"][4] == "1.010" and rows["paceline"][3] == "1.100" and rows["paceline"][-1] == "yes"
    assert "paceline@../before: failed: rank 0: ImportError: no" in text and "    | line a" in text
    assert exit_code(made) == 1, "one has failed"


def test_other_losses_than_those_of_the_bare_model_are_seen() -> None:
    made = machinery_report()
    made.contenders.pop()
    assert exit_code(made) == 0
    made.contenders[3].losses = [8.0, 8.1]
    machinery.compare(made, 1e-4)
    assert exit_code(made) == 1 and "NO (3e-02)" in render(machinery_tables(made)[0])


def test_without_the_bare_model_there_are_times_alone() -> None:
    made = machinery_report()
    made.contenders = made.contenders[2:]
    for result in made.contenders:
        result.to_bare = result.added_per_tensor_s = result.loss_difference = result.agrees = None
    machinery.compare(made, 1e-4)
    assert "–" in render(machinery_tables(made)[0])


def series_report() -> SeriesReport:
    return SeriesReport(asdict(RanksSpec()), Circumstances.now(), "ranks", [(1, report()), (2, report())])


def of_ourselves(spec: StepSpec, times: dict[str, float], **more: Any) -> StepComparison:
    contenders = [result(label, ms, [8.0], peak_bytes=int(1e8), **more) for label, ms in times.items()]
    return StepComparison(
        asdict(spec), Circumstances.now(), spec.shape.parameters, spec.shape.gradient_bytes, contenders
    )


def lanes_made() -> LanesReport:
    spec = LanesSpec(lanes="8", ranks="1,8")
    alone = of_ourselves(spec.at(8, 1), {"paceline": 500.0, "lanes": 520.0})
    ours = alone.result("lanes")
    assert ours is not None and ours.peak_bytes is not None
    ours.peak_bytes += 3 * alone.gradient_bytes
    full = {"paceline": 80.0, "lanes": 90.0, "paceline-torch": 100.0, "lanes-torch": 110.0}
    return lanes_report(spec, [alone, of_ourselves(spec.at(8, 8), full)])


def agreement_made() -> AgreementReport:
    spec = AgreementSpec(starts=2)
    starts = [{"no-agreement": 80.0, "agreement": 80.4}, {"no-agreement": 820.0, "agreement": 824.1}]
    return agreement_report(spec, [of_ourselves(spec.each(), times) for times in starts])


def test_lanes_are_judged_by_what_is_allowed() -> None:
    made = lanes_made()
    alone, shm, torch = made.rows
    assert (alone.allowed_ratio, alone.allowed_copies) == (None, 3) and alone.more_copies == pytest.approx(3)
    assert (shm.allowed_ratio, shm.allowed_copies, shm.more_copies) == (1.05, 0, 0)
    assert (torch.transport, torch.allowed_ratio) == ("torch", 1.15) and torch.ratio.value == pytest.approx(1.1)
    rows = {line.split()[0]: line for line in render(lanes_tables(made)[0]).splitlines() if line.strip()}
    assert "3.00 of 3 met" in rows["local"]
    assert "1.125" in rows["shm"] and "1.05 NOT met" in rows["shm"] and "1.15 met" in rows["torch"]
    assert "0.00 of 0 met" in rows["shm"] and rows["torch"].endswith("0.00 of 0"), "gloo's memory is not ours"
    assert exit_code(made) == 0
    made.points[1].contenders[0].state = "failed"
    assert exit_code(made) == 1
    assert "paceline, 8 lanes on 8: failed" in render(lanes_tables(made)[0])


def test_an_audit_is_shown_in_lanes() -> None:
    spec = AuditsSpec(lanes="8", ranks=2)
    made = audits_report(spec, [of_ourselves(spec.at(8), {"lanes": 80.0, "lanes-audited": 104.0})])
    (row,) = made.rows
    assert [row.ratio.value, row.of_a_lane, row.ratio_of_run] == pytest.approx([1.3, 1.2, 1.003])
    assert "1.0030" in render(audits_tables(made)[0])
    with pytest.raises(UsageError, match="expected multiples of ranks=2, got 3"):
        AuditsSpec(lanes="3")


def test_checks_are_judged_over_all_starts() -> None:
    made = agreement_made()
    assert made.ratio is not None and made.ratio.value == pytest.approx(1.005, abs=1e-6), "starts are not mixed"
    assert made.by_start == [pytest.approx(80.4 / 80), pytest.approx(824.1 / 820)]
    text = render(agreement_tables(made)[0])
    assert "1.01 met" in text and "start 2" in text
    made.points[0].contenders[1].state = "failed"
    gone = agreement_report(AgreementSpec(starts=1), made.points[:1])
    assert gone.ratio is None and "agreement, start 1: failed" in render(agreement_tables(gone)[0])


def test_the_other_tables() -> None:
    text = render(allreduce_tables(allreduce_report())[0])
    assert "ShmTransport" in text
    assert "mpi: not installed" in text
    text = render(hooks_tables(hooks_report())[0])
    assert " met" in text and "NOT met" in text and "torch@1: failed" in text
    assert hooks_cost.TARGET_S == 5e-6
    row = next(line for line in text.splitlines() if line.startswith("paceline") and line.split()[1] == "2")
    assert "step of 1,000 ms" in text and row.split()[-4:] == ["9.00", "5.00", "0.750", "0.70–0.81"]
    text = render(series_tables(series_report())[0])
    assert "paceline × torch" in text and "fabric at 2: failed" in text and "DIFFER" in text


@needs_matplotlib
@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("step", report),
        ("allreduce", allreduce_report),
        ("hooks", hooks_report),
        ("machinery", machinery_report),
        ("ranks", series_report),
        ("lanes", lanes_made),
        ("agreement", agreement_made),
    ],
)
def test_a_chart_is_drawn_from_json(name: str, make: Any, tmp_path: Path) -> None:
    CHARTS[name](json.loads(json.dumps(asdict(make())))).savefig(tmp_path / "chart.png")
    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


@needs_matplotlib
@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("kind", sorted(CHARTS.keys() - {"accumulate", "ranks"}))
def test_stored_results_can_be_drawn_again(kind: str, tmp_path: Path) -> None:
    stored = [file for file in STORED if f'"schema": "paceline-bench-{kind}/' in file.read_text()]
    draw(stored[0], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json_file": Path("no/such/report.json")}, "json='no/such/report.json': .* there is no no/such"),
        ({"json_file": Path("/")}, "json='/': expected a file, but this is a folder"),
        ({"png_file": Path("no/such/chart.png")}, "png='no/such/chart.png': .* there is no no/such"),
        ({"png_file": Path("chart.foo")}, r"png='chart.foo': expected a file that ends in .png, .svg, .pdf"),
        ({"png_file": Path("chart.png")}, r"pip install 'paceline\[bench\]'"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: dict[str, Path], words: str
) -> None:
    monkeypatch.setattr(plan_chart, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        conduct(COMMANDS["step"], {}, lambda _: pytest.fail("something was started"), **asked)
    assert not list(tmp_path.iterdir())


def test_an_unknown_contender_of_allreduce_is_refused() -> None:
    with pytest.raises(UsageError, match="no contender 'smoke'"):
        run_allreduce(AllReduceSpec(contenders=("smoke",)))


def test_the_command_of_a_result_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/here/paceline/bench/__main__.py", "step", "--json", "/root/out/found.json"])
    assert Circumstances.now().command == "python -m paceline.bench step --json found.json"
