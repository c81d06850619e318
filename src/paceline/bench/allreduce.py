"""`run_allreduce`: latency and bandwidth of all-reduce by size, contenders in turns."""

from dataclasses import asdict
from importlib.util import find_spec

from paceline.bench.conductor import Conductor, Say
from paceline.bench.contenders import label_each, parse_known
from paceline.bench.crew import Order
from paceline.bench.figures import flat, percentile
from paceline.bench.report import AllReduceReport, AllReduceRow, Circumstances
from paceline.bench.spec import AllReduceSpec, parse_sizes
from paceline.memory_plan.numbers import show_bytes

CONTENDERS = ("paceline", "gloo", "nccl", "mpi")
MOST_BYTES_PER_TURN = 32 * 1024 * 1024
REPEATS = (3, 50)


def run_allreduce(spec: AllReduceSpec, say: Say = lambda _: None) -> AllReduceReport:
    """Measure, and return what was found."""
    names = {label: parse_known(label, CONTENDERS) for label in label_each(spec.contenders)}
    absent = {label: why for label, found in names.items() if (why := _why_not(found.name, spec))}
    orders = [
        Order(
            label,
            "allreduce",
            asdict(spec),
            spec.ranks,
            spec.threads,
            "cuda" if spec.device == "cuda" and found.name in ("paceline", "nccl") else "cpu",
            launcher="mpiexec" if found.name == "mpi" else "plain",
            sources=found.sources,
        )
        for label, found in names.items()
        if label not in absent
    ]
    samples: dict[tuple[int, str], list[list[float]]] = {}
    sizes = parse_sizes(spec.sizes)
    with Conductor(orders, timeout_s=spec.timeout, say=say) as conductor:
        for nbytes in sizes:
            say(f"all-reduce of {show_bytes(nbytes)}")
            repeats = max(REPEATS[0], min(REPEATS[1], MOST_BYTES_PER_TURN // nbytes))
            for _, label in conductor.in_turns(spec.rounds):
                answers = conductor.ask(label, {"do": "run", "nbytes": nbytes, "repeats": repeats})
                if answers is not None:
                    turn = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
                    samples.setdefault((nbytes, label), []).append(turn)
        absent |= {label: failure.message for label, failure in conductor.failures.items()}
        built = conductor.built
    rows = [_row(label, nbytes, turns) for (nbytes, label), turns in samples.items() if label not in absent]
    _compare(rows)
    gpu = next((facts[0]["gpu"] for facts in built.values() if facts[0]["gpu"]), None)
    transport = built["paceline"][0]["transport"] if "paceline" in built else ""
    return AllReduceReport(asdict(spec), Circumstances.now(gpu, names), rows, absent, transport)


def _why_not(name: str, spec: AllReduceSpec) -> str:
    if name == "mpi" and find_spec("mpi4py") is None:
        return "not installed: pip install 'paceline[peers]'"
    if name == "nccl" and spec.device != "cuda":
        return "runs on cuda only"
    return ""


def _row(label: str, nbytes: int, turns: list[list[float]]) -> AllReduceRow:
    samples = flat(turns)
    middle = percentile(samples, 50)
    return AllReduceRow(label, nbytes, turns, middle, percentile(samples, 10), percentile(samples, 90), nbytes / middle)


def _compare(rows: list[AllReduceRow]) -> None:
    for row in rows:
        for other in rows:
            if other.nbytes == row.nbytes and other.label != row.label:
                row.speedup[other.label] = other.median_s / row.median_s
