"""The flags of `paceline run`: torchrun's, under the same names, and a few of its own."""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import UsageError

USAGE = "paceline run [-n RANKS] [flags] script.py [arguments of the script]"
ABOUT = """Run a script on several ranks of this machine, and supervise them.

torchrun's flags are accepted, with dashes or underscores, and its PET_* variables are the defaults.
Everything after the script belongs to the script."""

# Flags of torchrun that change nothing here, and why.
WITHOUT_EFFECT = {
    "monitor_interval": "exits of ranks are noticed at once",
    "start_method": "every rank is a fresh interpreter",
    "event_log_handler": "there is no event log",
    "run_path": "scripts run as with `python script.py`",
    "rdzv_conf": "there is no rendezvous to configure",
    "local_addr": "ranks find each other on loopback",
    "logs_specs": "logs are rank_N.log in the run's folder",
    "numa_binding": "ranks are not bound to processors; use numactl",
    "virtual_local_rank": "LOCAL_RANK stays the rank on this machine",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 are forwarded",
    "duplicate_stdout_filters": "equal lines are folded instead",
    "duplicate_stderr_filters": "equal lines are folded instead",
    "tee": "output is always both shown and written to a log",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        action.option_strings = [name for name in spellings if "_" not in name]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


def _add_elastic(add: Callable[..., None]) -> None:
    add("--ranks", metavar="MIN:MAX", about="replace lost ranks one by one, in scripts with paceline.Elastic")
    add("--spares", default="0", metavar="K", about="with --ranks: keep K more processes ready to step in [0]")
    add("--max-losses", metavar="K", about="with --ranks: give up when more than K ranks were lost [no limit]")
    about = "with --ranks: give up after S seconds with fewer than MIN ranks [600]"
    add("--recovery-timeout", metavar="S", about=about)


def _add_engine(add: Callable[..., None]) -> None:
    add("--engine", default="local", metavar="E", about="where ranks run: local, or ray for a Ray cluster [local]")
    add("--cpus-per-rank", metavar="N", about="with --engine ray: the CPUs that each rank needs [1]")
    add("--gpus-per-rank", metavar="N", about="with --engine ray: the GPUs that each rank needs [1 if there are any]")


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser, with PET_* variables of `environ` as defaults."""
    parser = _Parser("paceline run", USAGE, ABOUT, formatter_class=_Formatter, allow_abbrev=False)

    def add(*names: str, default: Any = None, switch: bool = False, about: str = "", **more: Any) -> None:
        spellings = dict.fromkeys(spelling for name in names for spelling in (name, _underscored(name)))
        dest = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
        given = environ.get(f"PET_{dest.upper()}")
        if switch:
            more["action"] = "store_true"
            default = given is not None and given not in ("0", "")
        else:
            default = default if given is None else given
        parser.add_argument(*spellings, dest=dest, default=default, help=about or argparse.SUPPRESS, **more)

    add("-n", "--nproc-per-node", "--num-processes", "-np", metavar="N", about="ranks: a number, auto, gpu or cpu [1]")
    _add_elastic(add)
    add("--gpu-ids", metavar="1,2", about="the GPUs that ranks see, in this order; without -n, one rank per GPU")
    _add_engine(add)
    add("-m", "--module", switch=True, about="the script is a module, run as `python -m`")
    add("--no-python", switch=True, about="the script is an executable, not a Python script")
    add("--max-restarts", default="0", metavar="K", about="restart all ranks after a failure, at most K times [0]")
    add(
        "--hang-timeout",
        metavar="S",
        about="seconds without progress after which a rank counts as hung [learned]; 0: never",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="F",
        help="inject a fault, such as 'kill rank=1 step=20'; may be repeated; see docs/faults.md",
    )
    add("--shutdown-timeout", metavar="S", about="seconds between SIGTERM and SIGKILL [30]")
    add("--nnodes", metavar="1", about="number of machines; for more than one, prints the torchrun command to use")
    add("--node-rank")
    add("--master-addr")
    add("--master-port", metavar="P", about="the port at which ranks find each other [any free one]")
    add("--log-dir", default="runs", metavar="DIR", about="logs go to DIR/<id>/rank_N.log [runs]")
    add(
        "-r",
        "--redirects",
        default="0",
        metavar="0-3",
        about="hide stdout (1), stderr (2) or both (3), of all ranks or as in 0:3,1:1",
    )
    add("--local-ranks-filter", default="", metavar="0,1", about="show only these ranks of this machine")
    add("--standalone", switch=True, about="ignore all rendezvous settings")
    add("--rdzv-backend", default="static")
    add("--rdzv-endpoint")
    add("--rdzv-id", default="", metavar="ID", about="name of the job, which ranks see as TORCHELASTIC_RUN_ID")
    add("--role", default="default")
    add("-t", "--tee")
    for name in WITHOUT_EFFECT:
        if name != "tee":
            add("--" + name.replace("_", "-"), switch=name in ("run_path", "virtual_local_rank"))
    parser.add_argument("script", nargs="?", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    """The flags of one command line. Raises `UsageError` for one that cannot be used."""
    found = build_parser(os.environ if environ is None else environ).parse_args(list(argv))
    if found.script is None:
        raise UsageError("no script was given: expected `paceline run [flags] script.py …`")
    return found


def notes(flags: argparse.Namespace) -> list[str]:
    """A line for each flag that is accepted and changes nothing, and one for an -n that comes too late."""
    late = [word for word in flags.arguments if re.match(r"(-n|--nproc[-_]per[-_]node)(?![a-z])", word)]
    return [
        *(
            f"{word} comes after {flags.script}, so it is passed to the script, and one rank is started; to start "
            f"several, put -n before the script"
            for word in late[:1]
            if flags.nproc_per_node is None
        ),
        *(
            f"--{name.replace('_', '-')} changes nothing here: {reason}"
            for name, reason in WITHOUT_EFFECT.items()
            if getattr(flags, name)
        ),
    ]


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name
