"""The process that runs upstream tests."""

from collections.abc import Iterator

import pytest

from tests.conformance.runner import Runner


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    if "upstream" in request.fixturenames:
        test = request.getfixturevalue("upstream")
        request.getfixturevalue("runner").prepare(test, tmp_path_factory.mktemp("upstream"))


@pytest.fixture(autouse=True)
def leak_police(prepared: None, leak_police: None) -> None:
    """The process outlives the test that it was started for, so it is started before the police looks."""
