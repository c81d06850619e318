"""Which upstream tests there are to run, and the modules that hold them.

An upstream test is named SUITE::Class.test. The suites `wheel` (2 ranks) and `wheel4` (4 ranks) come with the installed
torch; the others are read from a git directory of pytorch. `+cpu` after a suite says that its source is rewritten to
run on the CPU. No source of PyTorch is kept in this repository: modules are written to a temporary folder.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.conformance import on_cpu

HERE = Path(__file__).parent
# "module:Class". With torch's own class the suite checks its list of tests instead of ours.
CLASS_VARIABLE = "CONFORMANCE_CLASS"
OURS = "paceline:DistributedDataParallel"
GIT_VARIABLE = "PYTORCH_GIT"
# ids.txt, ids_git.txt and DEVIATIONS.md are true of this version of torch; others may lack some of the tests.
LISTED = "2.13.0"
# torch/nn/parallel/distributed.py is the same there as in the wheel of that version.
COMMIT = "7ee00f187cb55019d648efc6779c0925f643f01c"

IMPORT = "from tests.conformance import substitute as _substitute\n"
WHEEL_IMPORT = "from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend\n"
WHEEL_CLASS = """
class Wheel(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""


@dataclass(frozen=True)
class Suite:
    """Where a suite's tests come from. Files are under test/distributed, the one with the tests first."""

    files: tuple[str, ...] = ()  # none: the installed torch
    world_size: int = 2
    alone: bool = False  # its tests leave their process unfit for the next one


SUITES = {
    "wheel": Suite(),
    "wheel4": Suite(world_size=4),
    "gloo": Suite(("test_c10d_gloo.py", "test_c10d_common.py")),
    "spawn_gloo": Suite(("test_c10d_spawn_gloo.py", "test_c10d_spawn.py"), alone=True),
    "pypg": Suite(("test_c10d_pypg.py", "test_c10d_common.py")),
    "zero": Suite(("optim/test_zero_redundancy_optimizer.py",)),
    "hooks": Suite(("algorithms/ddp_comm_hooks/test_ddp_hooks.py",)),
    "nccl": Suite(("test_c10d_nccl.py", "test_c10d_common.py")),
    "state_dict": Suite(("checkpoint/test_state_dict.py",)),
    "replicate_compile": Suite(("_composable/test_replicate_with_compiler.py",)),
}


@dataclass(frozen=True)
class UpstreamTest:
    """A test by name."""

    variant: str  # the suite, with "+cpu" where it is rewritten
    name: str  # Class.test

    @classmethod
    def parse(cls, text: str) -> "UpstreamTest":
        variant, _, name = text.partition("::")
        return cls(variant, name)

    def __str__(self) -> str:
        return f"{self.variant}::{self.name}"

    @property
    def method(self) -> str:
        return self.name.partition(".")[2]

    @property
    def suite(self) -> Suite:
        return SUITES[self.variant.removesuffix("+cpu")]

    @property
    def rewritten(self) -> bool:
        return self.variant.endswith("+cpu")

    @property
    def source(self) -> str:
        """Tests with the same source can be run by the same process."""
        return f"{self.suite.files[0] if self.suite.files else 'wheel'}{'+cpu' if self.rewritten else ''}"


def read_list(name: str) -> list[UpstreamTest]:
    lines = (HERE / name).read_text().splitlines()
    return [UpstreamTest.parse(line) for line in lines if line and not line.startswith("#")]


def absent() -> set[str]:
    """The listed tests that come with torch, but not with the installed version of it."""
    if torch.__version__.partition("+")[0] == LISTED:
        return set()  # where all of them must be
    found = set(re.findall(r"def (test_\w+)", _wheel_source()))
    return {test.method for test in read_list("ids.txt") if test.method not in found}


def git_directory() -> str | None:
    return os.environ.get(GIT_VARIABLE) or None


def write_module(test: UpstreamTest, folder: Path) -> str:
    """Write the module that holds `test` into `folder`; returns its name."""
    if not test.suite.files:
        text = _wheel_source() if test.rewritten else WHEEL_IMPORT
        return _write(folder / "upstream_wheel.py", text, test, then=WHEEL_CLASS)
    names = [_write(folder / Path(file).name, _from_git(file), test) for file in test.suite.files]
    return names[0]


def _write(file: Path, source: str, test: UpstreamTest, then: str = "") -> str:
    text = on_cpu.rewrite(source) if test.rewritten else source
    future = re.search(r"^from __future__ .*\n", text, re.MULTILINE)
    start = future.end() if future else 0
    file.write_text(text[:start] + IMPORT + text[start:] + then)
    return file.stem


def _wheel_source() -> str:
    return (Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py").read_text()


def _from_git(file: str) -> str:
    command = ["git", "--git-dir", str(git_directory()), "show", f"{COMMIT}:test/distributed/{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
