"""Which line made a call, and when two such lines are the same one."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.collectives.call_site import DEPTH, CallFrame, call_site, describe_site, difference


def found_in(source: str, file: str) -> tuple[CallFrame, ...]:
    names: dict[str, object] = {"call_site": call_site}
    exec(compile(source, file, "exec"), names)
    site = names["site"]
    assert isinstance(site, tuple)
    return site


HELPED = "def mean():\n    return call_site()\ndef main():\n    return mean()\nsite = main()\n"


def test_frames_go_outwards_with_short_paths() -> None:
    site = found_in(HELPED, "/home/one/project/train.py")
    assert [str(frame) for frame in site[:3]] == [
        "project/train.py:2 in mean",
        "project/train.py:4 in main",
        "project/train.py:5",
    ]
    assert len(site) == DEPTH
    assert difference(site, found_in(HELPED, "/mnt/two/project/train.py")) is None
    assert describe_site(site, 2) == " at project/train.py:2 in mean, called at project/train.py:4 in main"
    assert describe_site(()) == ""


def test_the_caller_of_a_wrapper_counts() -> None:
    first, second = (found_in(HELPED.replace("main():\n", f"main():{lines}"), "/a/b.py") for lines in ("\n", "\n\n"))
    assert difference(first, second) == 1


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ("/tmp/ipykernel_12/345.py", "/tmp/ipykernel_99/345.py", None),
        ("<ipython-input-3-abc>", "<ipython-input-7-abc>", None),
        ("/tmp/ipykernel_12/345.py", "/tmp/ipykernel_12/678.py", None),  # two cells, each for some of the ranks
        ("<stdin>", "<stdin>", None),
        ("/job/train.py", "/job/other.py", 0),
        ("/job/train.py", "/tmp/ipykernel_12/345.py", 0),
    ],
)
def test_files(one: str, other: str, place: int | None) -> None:
    source = "site = call_site()"
    assert difference(found_in(source, one), found_in(source, other)) == place


def test_two_lines_of_one_cell_differ() -> None:
    file = "/tmp/ipykernel_12/345.py"
    first, second = found_in("site = call_site()", file), found_in("\nsite = call_site()", file)
    assert difference(first, second) == 0
    assert str(second[0]) == "line 2 of a cell"


def test_how_a_rank_was_started_does_not_count() -> None:
    sites: list[tuple[CallFrame, ...]] = []

    def work() -> None:
        sites.append(call_site())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert len(sites[0]) == 1 < len(sites[1])
    assert difference(*sites) is None


def test_what_paceline_itself_calls_is_one_frame() -> None:
    home = Path(paceline.__file__).parent
    source = "def gather():\n    return asks()\n"
    ours: dict[str, Callable[[], tuple[CallFrame, ...]]] = {"asks": lambda: call_site(skip=__file__)}
    exec(compile(source, str(home / "checkpoint" / "agree.py"), "exec"), ours)
    assert [str(frame) for frame in ours["gather"]()] == ["checkpoint/agree.py:2 in gather"]
