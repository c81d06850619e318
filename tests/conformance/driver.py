"""The process that runs upstream tests, one after another, for tests/conformance/runner.py."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
import unittest
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

READY = "ready"


@dataclass(frozen=True)
class Order:
    """One test to run."""

    name: str  # Class.test
    world_size: int


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    result: str  # "passed", "failed", "skipped"
    message: str
    seconds: float


def serve(descriptor: int, module_name: str) -> None:
    """Run the tests of a module as they are asked for, until the other end goes away."""
    connection = Connection(descriptor)
    # The server that ranks are forked from imports the module while we do.
    multiprocessing.get_context("forkserver").set_forkserver_preload([module_name])
    multiprocessing.forkserver.ensure_running()
    module = importlib.import_module(module_name)
    connection.send(READY)
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        connection.send(run(module, order))


def run(module: Any, order: Order) -> Outcome:
    started = time.monotonic()
    os.environ["WORLD_SIZE"] = str(order.world_size)
    class_name, _, test_name = order.name.partition(".")
    try:
        result = unittest.TestResult()
        unittest.TestSuite([getattr(module, class_name)(test_name)]).run(result)
        verdict, message = _verdict(result)
    except (Exception, SystemExit):  # noqa: BLE001 - upstream leaves a test in many ways
        verdict, message = "failed", traceback.format_exc()
    return Outcome(verdict, message, time.monotonic() - started)


def _verdict(result: unittest.TestResult) -> tuple[str, str]:
    bad = result.errors + result.failures
    if bad:
        return "failed", bad[0][1]
    if result.unexpectedSuccesses:
        return "failed", "passed, but upstream expects a failure"
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return ("passed", "") if result.testsRun else ("failed", "nothing was run")
