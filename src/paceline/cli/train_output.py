"""What the launcher of `paceline train` shows: a live display on a terminal, plain lines elsewhere."""

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cli.elastic_lines import ElasticLines
from paceline.launch import Fold, JobFailure, JobOutcome, Listener, spans
from paceline.launch.elastic_actions import Formed, Loss
from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder
from paceline.train.run_report import facts
from paceline.typed_json import UNREADABLE, shown

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
PLAIN_EVERY_S = 5.0
_STEP = ("loss", "tokens_per_s", "own_tokens_per_s", "step_s", "exposed_s", "data_s")  # what is shown of a step
STOPPED_EXIT = 128 + 15  # as a process that SIGTERM has ended


class TrainOutput(Listener):
    """A listener that shows what ranks write and report. It alone draws; ranks never do."""

    def __init__(self, config: TrainConfig, ranks: int, folder: RunFolder, console: Console) -> None:
        self._config = config
        self._folder = folder
        self._console = console
        self._live: Live | None = None
        self._fold = Fold[str](lambda ranks, text: self._print(f"[{spans(ranks)}] {text}"), ranks)
        self._losses: list[float] = []
        self._of_rank: list[dict[str, Any]] = [{} for _ in range(ranks + config.spares)]
        self._leader: int | None = 0  # whose reports are shown; of equals, another one's when it is lost
        self._elastic = ElasticLines()
        self._step = self._first_step = 0
        self._first_step_at = 0.0
        self._shown_at = 0.0
        self._note = "starting"
        self._refused = ""  # why a rank refused to go on, as it reported

    # ---- what the supervisor calls

    def line(self, rank: int, text: str) -> None:
        self._fold.add(rank, text, time.monotonic())

    def error_line(self, rank: int, text: str) -> None:
        """Only warnings of standard error are shown here; tracebacks are shown once, at the end."""
        if "Warning: " in text:
            self.line(rank, text)

    def note(self, text: str) -> None:
        self._print(text)

    def lost(self, loss: Loss) -> None:
        self._print(self._elastic.lost(loss))
        self._of_rank[loss.slot] = {}
        if loss.slot == self._leader:
            self._leader = None

    def formed(self, formed: Formed) -> None:
        self._print(self._elastic.formed(formed))

    def reported(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._reported(rank, kind, fields)
        except UNREADABLE as error:  # whatever a rank has started may write to its pipe
            self._print(f"rank {rank} reported {shown(kind)!r} with missing or invalid fields ({error!r})")

    def _reported(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if self._leader is None and kind == "step":
            self._leader = rank
        if kind == "step":
            self._stepped(rank, fields)
        elif kind == "refused":
            self._refused = str(fields["text"])
        elif rank != self._leader:
            return
        elif kind == "ready":
            lanes = f", {fields['lanes']} lanes" if fields["lanes"] else ""
            over = f" over {fields['shard']}" if fields["shard"] else ""
            where = f"{fields['ranks']} ranks on {fields['device']}, {fields['placement']}{over}{lanes}"
            where += f", {fields['samples']} x {fields['context']:,} tokens per step"
            self._note = f"{fields['parameters'] / 1e6:.2f} M parameters, {where}"
            self._print(f"{self._note}; {fields['source']}")
            self._print(f"run: {self._folder.path}")
        elif kind == "checked" and fields["planned"] is not None:
            planned, measured = fields["planned"] / 2**20, fields["measured"] / 2**20
            off = f"the plan is {planned / measured - 1:+.0%}"
            self._print(f"memory of a rank: {planned:,.0f} MiB planned, {measured:,.0f} MiB measured: {off}")
            if fields["difference"] is not None:
                self._print(f"gradients against one process: largest difference {fields['difference']:.1e}")
        elif kind == "held_out":
            self._print(f"step {fields['step']:5d}   held-out text {fields['per_byte']:.3f} nats per byte")
        elif kind == "resumed":
            self._resumed(fields)
        elif kind == "trouble":
            self._print(str(fields["text"]))
        elif kind == "saved" and fields["problem"]:
            self._print(f"step {fields['step']:5d}   checkpoint NOT saved: {fields['problem']}")

    def restarting(self, attempt: int, failure: JobFailure) -> None:
        self._print(f"restart {attempt} of {self._config.max_restarts}: {failure}")
        self._of_rank = [{} for _ in self._of_rank]
        self._leader = 0

    def tick(self) -> None:
        self._fold.flush(time.monotonic())
        if self._live is not None:
            self._live.update(self._picture())

    # ---- what is shown

    def _stepped(self, rank: int, fields: dict[str, Any]) -> None:
        fields = {"step": int(fields["step"]), **{name: float(fields[name]) for name in _STEP}}
        self._of_rank[rank] = fields
        if rank != self._leader:
            return
        self._step = fields["step"]
        self._losses.append(fields["loss"])
        if not self._first_step_at:
            self._first_step, self._first_step_at = self._step, time.monotonic()
        last = self._step == self._config.steps
        if self._live is None and (last or time.monotonic() - self._shown_at >= PLAIN_EVERY_S):
            self._shown_at = time.monotonic()
            self._print(self._plain(fields))

    def _resumed(self, fields: dict[str, Any]) -> None:
        self._print(f"resumed from step {fields['step']}; {fields['redone']} step(s) will be repeated")
        if fields["jump"]:
            before, after = fields["jump"]
            self._print(
                f"the learning rate jumps from {before:.2e} to {after:.2e} here, because earlier steps followed "
                f"another schedule (see --decay-steps)"
            )
        for skipped in fields["skipped"]:
            self._print(f"skipped a checkpoint: {skipped}")

    def _plain(self, fields: dict[str, Any]) -> str:
        return (
            f"step {self._step:5d}/{self._config.steps}   loss {fields['loss']:.3f}   "
            f"{fields['tokens_per_s']:,.0f} tokens/s   {fields['step_s'] * 1e3:.0f} ms per step, "
            f"{fields['exposed_s'] * 1e3:.1f} exposed{self._left()}"
        )

    def _left(self) -> str:
        """How long the remaining steps will take, as the end of a line, once there is a step to estimate it from."""
        done = self._step - self._first_step
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self._first_step_at) / done * (self._config.steps - self._step)
        return f"   {seconds / 60:.0f} min left" if seconds > 120 else f"   {seconds:.0f} s left"

    def _picture(self) -> Group:
        head = Text(f"step {self._step}/{self._config.steps}", style="bold")
        if self._losses:
            head.append(f"   loss {self._losses[-1]:.3f}  ", style="bold cyan")
            head.append(sparkline(self._losses, WIDTH), style="cyan")
            head.append(self._left(), style="default")
        else:
            head.append(f"   {self._note}", style="dim")
        table = Table(box=None, pad_edge=False)
        for title in ("rank", "tokens/s", "step ms", "exposed ms", "data ms"):
            table.add_column(title, justify="right", style="dim", header_style="dim")
        for rank, fields in enumerate(self._of_rank):
            if fields:
                times = (fields["step_s"], fields["exposed_s"], fields["data_s"])
                table.add_row(
                    str(rank), f"{fields['own_tokens_per_s']:,.0f}", *(f"{1e3 * seconds:.1f}" for seconds in times)
                )
        return Group(head, table)

    def _print(self, text: str) -> None:
        self._console.print(text)

    def show_failure(self, outcome: JobOutcome) -> None:
        failure = outcome.failure
        self._fold.flush(float("inf"))
        if failure is None or outcome.signal:
            self._print(f"paceline train: ended by {outcome.signal or 'a rank'}; run: {self._folder.path}")
        elif self._refused:
            self._print(f"paceline train: {self._refused}")
        else:
            for line in (*failure.lines(), f"full logs: {self._folder.path}/rank_*.log"):
                self._print(line)

    @contextmanager
    def live(self) -> Iterator["TrainOutput"]:
        if not self._console.is_terminal:
            yield self
            return
        with Live(self._picture(), console=self._console, refresh_per_second=10, transient=True) as self._live:
            yield self
        self._live = None


def open_output(config: TrainConfig, ranks: int, folder: RunFolder) -> AbstractContextManager[TrainOutput]:
    return TrainOutput(config, ranks, folder, _console()).live()


def sparkline(values: list[float], width: int) -> str:
    """Means of equal parts of the series, as bars between its lowest and highest. Values that are not finite are left
    out."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)


def _console() -> Console:
    return Console(markup=False, highlight=False, soft_wrap=True)


def print_summary(folder: RunFolder) -> int:
    """Show how a run ended. Returns the exit code: a run that was asked to stop is not a finished one."""
    result = folder.result()
    console = _console()
    if result["ended"] == "stopped":
        console.print(f"stopped on request after step {result['steps']}, which is saved in {folder.checkpoints}")
        console.print(f"continue with: {program()} train --out {folder.path}")
        return STOPPED_EXIT
    if result["sample"]:
        console.rule("a sample, continuing held-out text", style="dim")
        console.print(result["sample"])
        console.rule(style="dim")
    for name, text in (*facts(result), ("checkpoints", str(folder.checkpoints)), ("report", str(folder.report_file))):
        console.print(f"{name:<23}{text}")
    console.print("\nNext:", style="bold")
    for command in next_commands(folder, result["steps"]):
        console.print(f"  {command}")
    return 0


def program() -> str:
    """The command that starts this program again: without an active virtual environment it is not on the PATH."""
    if shutil.which("paceline"):
        return "paceline"
    started = Path(sys.argv[0])
    return str(started) if started.name == "paceline" and started.exists() else f"{sys.executable} -m paceline.cli"


def next_commands(folder: RunFolder, steps: int) -> list[str]:
    """Three commands to try, ready to be copied."""
    own = program()
    example = "examples/own_model.py" if Path("examples/own_model.py").exists() else "your_script.py"
    commands = {
        f"{own} train --out {folder.path} --steps {2 * steps}": "continues where it ended",
        f"{own} bench": "compares with torch's DDP on this machine",
        f"{own} run -n 2 {example}": "your own model",
    }
    width = max(map(len, commands))
    return [f"{command:<{width}}   # {about}" for command, about in commands.items()]
