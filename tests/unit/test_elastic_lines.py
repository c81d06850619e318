"""What `paceline run` says of an elastic job."""

import pytest

from paceline.cli.elastic_lines import ElasticLines
from paceline.launch import Formed, Loss
from paceline.member_messages import NEVER, Generation


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (Loss(1, 1, 1, 7, "was killed by SIGKILL"), "rank 1 was killed by SIGKILL (at step 7)"),
        (Loss(5, 3, 1, NEVER, "exited with code 1"), "rank 1 (slot 3) exited with code 1"),
        (
            Loss(5, 3, NEVER, NEVER, "exited with code 1"),
            "a process in slot 3, which had no rank yet, exited with code 1",
        ),
    ],
)
def test_a_loss_is_one_line(loss: Loss, line: str) -> None:
    assert ElasticLines().lost(loss) == line


def test_a_job_is_told_line_by_line() -> None:
    lines = ElasticLines()
    founded = lines.formed(Formed(Generation(0, (0, 1, 2), (0,), 0, True), 3, 2.04))
    assert founded == "generation 0: 3 ranks after 2.0 s"
    assert lines.summary() == []
    lines.lost(Loss(1, 1, 1, 7, "was killed by SIGKILL"))
    first = lines.formed(Formed(Generation(1, (0, 2), (0,), 7, False), 0, 0.031))
    assert first == "generation 1: 2 ranks go on from step 7 after 0.03 s"
    assert lines.formed(Formed(Generation(2, (0,), (0,), 9, False), 0, 0.5)) == (
        "generation 2: 1 rank goes on from step 9 after 0.50 s"
    )
    assert lines.formed(Formed(Generation(3, (5, 6), (), NEVER, False), 2, 1.5)) == (
        "generation 3: 2 ranks (2 new) go on from the newest checkpoint after 1.50 s"
    )
    assert lines.summary() == ["1 rank was lost and 2 joined later; 4 generations, 2.03 s between them"]
