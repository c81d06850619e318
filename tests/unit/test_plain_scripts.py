"""Ranks of scripts that note nothing: what is a hang there, and what is not."""

from paceline.launch.plain_scripts import PlainScripts
from paceline.launch.watchdog import Hang
from paceline.process_status import ProcessStatus

LIMIT_S = 10.0
IN_COLLECTIVE = ['  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce', "at train.py"]
ELSEWHERE = ['  File "/home/me/train.py", line 7 in rest']


def watch(
    plain: PlainScripts,
    seconds: int,
    *,
    share: tuple[float, float] = (0.0, 0.0),
    silent: int | None = None,
    beats: bool = True,
    rests: tuple[list[str], list[str]] = (IN_COLLECTIVE, ELSEWHERE),
    begin: int = 0,
) -> tuple[Hang | None, list[str]]:
    """Look at two ranks every second while each uses so much of a core. Returns the hang, and what was said of silence.
    `silent`: the rank whose thread does not run."""
    said: list[str] = []
    for second in range(begin, begin + seconds):
        now = 100.0 + second
        statuses = {rank: ProcessStatus("S", share[rank] * second) for rank in (0, 1)}
        found = {rank: 100.0 if rank == silent else now if beats else 0.0 for rank in (0, 1)}
        said += plain.silent(now, found)
        if (hang := plain.look(now, statuses, found, dict(enumerate(rests)))) is not None:
            return hang, said
    return None, said


def test_of_ranks_that_do_nothing_the_one_outside_a_collective_is_at_fault() -> None:
    hang, _ = watch(PlainScripts(LIMIT_S), 20)
    assert hang is not None and hang.ranks == (1,)
    assert "no rank has done anything for 11 s (limit 10 s)" in hang.reason
    assert "rank 1 in /home/me/train.py:7 in rest" in hang.reason


def test_if_all_are_in_collectives_none_of_them_is_picked() -> None:
    hang, _ = watch(PlainScripts(LIMIT_S), 20, rests=(IN_COLLECTIVE, IN_COLLECTIVE))
    assert hang is not None and hang.ranks == (0, 1)


def test_nothing_is_a_hang_while_a_rank_works_or_without_a_limit() -> None:
    assert watch(PlainScripts(LIMIT_S), 60, share=(0.0, 0.1)) == (None, [])
    assert watch(PlainScripts(None), 60) == (None, [])
    assert watch(PlainScripts(LIMIT_S), 60, beats=False, rests=([], [])) == (None, [])  # a program that is not Python
    assert watch(PlainScripts(LIMIT_S), 60, rests=(ELSEWHERE, ELSEWHERE)) == (None, [])  # nobody waits for anybody


def test_a_rank_in_which_no_python_runs_is_named_once_and_is_at_fault_where_others_wait() -> None:
    hang, _ = watch(PlainScripts(LIMIT_S), 60, silent=1, share=(0.0, 1.0))
    assert hang is not None and hang.ranks == (1,) and hang.how.startswith("hangs in native code")
    for limit, rests in ((None, (IN_COLLECTIVE, ELSEWHERE)), (LIMIT_S, (ELSEWHERE, ELSEWHERE))):
        hang, said = watch(PlainScripts(limit), 60, silent=1, rests=rests)
        assert hang is None
        assert said == ["rank 1 has run no Python for 16 s: native code holds the interpreter's lock (GIL)"]


def test_a_launcher_that_was_stopped_begins_anew() -> None:
    plain = PlainScripts(LIMIT_S)
    assert watch(plain, 8)[0] is None
    assert watch(plain, 8, begin=60)[0] is None
