"""The flags of `paceline run`: torchrun's, under the same names, and a few of its own."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

USAGE = "paceline run [-n RANKS] [flags] script.py [arguments of the script]"
ABOUT = """Start a script on several ranks, and watch over them.

torchrun's flags are accepted as they are, with dashes or underscores, and its PET_* variables as defaults.
Everything after the script belongs to the script."""

# Flags of torchrun that change nothing here, and why.
WITHOUT_EFFECT = {
    "monitor_interval": "ends of ranks are noticed at once",
    "start_method": "every rank is a fresh interpreter",
    "event_log_handler": "there is no event log",
    "run_path": "scripts run as `python script.py` does",
    "rdzv_conf": "there is no rendezvous to configure; see --join-timeout",
    "local_addr": "the address is that of the way to --master-addr",
    "logs_specs": "logs are rank_N.log in the run's folder",
    "numa_binding": "ranks are not bound to processors; use numactl",
    "virtual_local_rank": "LOCAL_RANK stays the number on this machine",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 are passed on",
    "duplicate_stdout_filters": "equal lines are folded instead",
    "duplicate_stderr_filters": "equal lines are folded instead",
    "tee": "output is always both shown and written to a file",
}


class Refused(Exception):
    """The command line cannot be used; the text is one clear line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        action.option_strings = [name for name in spellings if "_" not in name]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


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
    add("--gpu-ids", metavar="1,2", about="the GPUs that ranks see, in this order; without -n one rank each")
    add("-m", "--module", switch=True, about="the script is a module, run as `python -m`")
    add("--no-python", switch=True, about="the script is a program of its own, not Python")
    add("--max-restarts", default="0", metavar="K", about="start all ranks again after a failure, K times at most [0]")
    add(
        "--hang-timeout",
        metavar="S",
        about="seconds without progress before a rank counts as hanging [learned]; 0: never",
    )
    add("--shutdown-timeout", metavar="S", about="seconds between SIGTERM and SIGKILL [30]")
    add("--nnodes", metavar="M", about="machines [1, or as Slurm and SkyPilot say]")
    add("--node-rank", metavar="R", about="which machine this is")
    add("--master-addr", metavar="A", about="where machine 0 can be reached")
    add("--master-port", metavar="P", about="its port [29500 with several machines, else any free one]")
    add("--secret-file", metavar="F", about="what the launchers of a job share [PACELINE_JOB_SECRET]")
    add("--join-timeout", metavar="S", about="seconds to wait for other machines [600]")
    add("--log-dir", default="runs", metavar="DIR", about="logs go to DIR/<id>/rank_N.log [runs]")
    add(
        "-r",
        "--redirects",
        default="0",
        metavar="0-3",
        about="keep 1: output, 2: errors, 3: both off the screen; or 0:3,1:1",
    )
    add("--local-ranks-filter", default="", metavar="0,1", about="show only these ranks of this machine")
    add("--standalone", switch=True, about="one machine, any free port")
    add("--rdzv-backend", default="static")
    add("--rdzv-endpoint", metavar="A:P", about="the same as --master-addr A --master-port P")
    add("--rdzv-id", default="", metavar="ID", about="a name of the job, seen by ranks as TORCHELASTIC_RUN_ID")
    add("--role", default="default")
    add("-t", "--tee")
    for name in WITHOUT_EFFECT:
        if name != "tee":
            add("--" + name.replace("_", "-"), switch=name in ("run_path", "virtual_local_rank"))
    parser.add_argument("script", nargs="?", help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    """The flags of one command line. Raises `Refused` for one that cannot be used."""
    found = build_parser(os.environ if environ is None else environ).parse_args(list(argv))
    if found.script is None:
        raise Refused("there is no script: expected `paceline run [flags] script.py …`")
    return found


def notes(flags: argparse.Namespace) -> list[str]:
    """A line for each flag that is accepted and changes nothing."""
    return [
        f"--{name.replace('_', '-')} changes nothing here: {reason}"
        for name, reason in WITHOUT_EFFECT.items()
        if getattr(flags, name)
    ]


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name
