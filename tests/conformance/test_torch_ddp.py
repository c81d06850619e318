"""PyTorch's own tests of DistributedDataParallel, run against ours.

    pytest tests/conformance                                             # what comes with the installed torch
    PYTORCH_GIT=<git directory of pytorch> pytest tests/conformance      # also what does not
    CONFORMANCE_CLASS=torch.nn.parallel:DistributedDataParallel pytest tests/conformance    # is the list right?

ids.txt and ids_git.txt list every such test that torch 2.13.0's own class passes on the CPU; the second also those of
the wheel that take half a minute, and that ids.txt has with fewer ranks. With another version of torch, those that it
does not have are skipped. DEVIATIONS.md lists those that ours does not pass, and is held to be true: a deviation that
passes, or fails in another way, is a failure.
"""

import os

import pytest
import torch

from tests.conformance.deviations import Deviation, read_deviations
from tests.conformance.runner import Runner
from tests.conformance.suites import (
    CLASS_VARIABLE,
    COMMIT,
    GIT_VARIABLE,
    OURS,
    UpstreamTest,
    absent,
    git_directory,
    read_list,
)

DEVIATIONS = read_deviations() if os.environ.get(CLASS_VARIABLE, OURS) == OURS else []
ABSENT = absent()
TIMEOUT_S = 130  # above tests/conformance/runner.py:DEADLINE_S, which says more about what hung


class Deviates(Exception):
    """An upstream test failed in the way that DEVIATIONS.md says."""


def deviation_of(test: UpstreamTest) -> Deviation | None:
    return next((deviation for deviation in DEVIATIONS if deviation.covers(test)), None)


def cases(name: str) -> list[object]:
    return [case(test) for test in read_list(name)]


def case(test: UpstreamTest) -> object:
    deviation = deviation_of(test)
    marks = [pytest.mark.xfail(reason=deviation.reason, raises=Deviates, strict=True)] if deviation else []
    if test.method in ABSENT:
        marks.append(pytest.mark.skip(reason=f"not in torch {torch.__version__}"))
    return pytest.param(test, marks=marks, id=str(test))


def git_cases() -> list[object]:
    if git_directory() is not None:
        return cases("ids_git.txt")
    reason = f"{GIT_VARIABLE} does not name a git directory of pytorch that holds {COMMIT[:12]}"
    return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="no git directory")]


def check(runner: Runner, test: UpstreamTest) -> None:
    outcome = runner.run(test)
    if outcome.result == "passed":
        return
    deviation = deviation_of(test)
    if deviation is not None and deviation.message in outcome.message:
        raise Deviates(deviation.message)
    pytest.fail(f"{outcome.result} after {outcome.seconds:.1f} s\n{outcome.message}", pytrace=False)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("upstream", cases("ids.txt"))
def test_from_the_wheel(runner: Runner, upstream: UpstreamTest) -> None:
    check(runner, upstream)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("upstream", git_cases())
def test_from_git(runner: Runner, upstream: UpstreamTest) -> None:
    check(runner, upstream)


def test_every_deviation_is_about_a_listed_test() -> None:
    listed = {(test.method, test.variant) for name in ("ids.txt", "ids_git.txt") for test in read_list(name)}
    stated = {(deviation.method, variant) for deviation in read_deviations() for variant in deviation.variants}
    assert stated
    assert stated <= listed
