"""The magics in a real kernel, with two real ranks behind it. The tests build on each other, as cells do."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.notebook.routing import Router
from paceline.notebook.session import NotebookSession
from tests.notebook.notebook import Notebook, gone_within

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.timeout(120)

TRAIN = """
for step in range(30):
    loss = model(torch.randn(32, 16)).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    found = Notebook(tmp_path_factory.mktemp("kernel"))
    found.good("%load_ext paceline")
    yield found
    found.close()


def both(line: str) -> dict[int, list[str]]:
    return {0: [line], 1: [line]}


def pids(notebook: Notebook) -> list[int]:
    status = notebook.good("%dist_status").stdout
    return [int(found) for found in re.findall(r"PID (\d+)", status)]


# ---------------------------------------------------------------------------------------------------- before the ranks


@pytest.mark.parametrize("cell", ["%%rank [0]\n1", "%dist_status", "%sync", "%dist_restart 0", "%dist_mode on"])
def test_without_ranks_a_magic_says_how_to_start_them(notebook: Notebook, cell: str) -> None:
    found = notebook.run(cell)
    assert not found.ok
    assert "there are no ranks yet: start them with %dist_init --num-processes 2" in found.all


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0", "expected --num-processes of at least 1, got 0"),
        ("-n 2 --gpu-ids 90,91", "there is no GPU 90, 91"),
        ("-n 2 --gpu-ids one", "expected GPUs as numbers with commas"),
        ("-n 2 --lanes 1", "expected --lanes of at least 2, one for each rank, got 1"),
        ("-n 2 --transport pigeon", "expected --transport auto, shm, torch, got pigeon"),
        ("--no-such-option", "unrecognized arguments"),
    ],
)
def test_a_wish_that_cannot_be_granted_starts_nothing(notebook: Notebook, options: str, message: str) -> None:
    found = notebook.run(f"%dist_init {options}")
    assert not found.ok
    assert message in found.all
    assert "there are no ranks yet" in notebook.run("%dist_status").all


def test_before_and_after_init_in_one_cell(notebook: Notebook) -> None:
    notebook.good("x = 5; rank = 'mine'")
    found = notebook.good("# a comment\n%dist_init -n 2  # two of them\nprint('on', rank, 'of', world_size)")
    assert found.said == {0: ["on 0 of 2"], 1: ["on 1 of 2"]}
    assert "ready → cpu" in found.all


# ------------------------------------------------------------------------------------------------------ where cells run


def test_names_that_cells_find(notebook: Notebook) -> None:
    found = notebook.good(
        "print(get('rank') == rank, get('ws'), local_rank == rank, gpu_id, device, dist.get_world_size())"
    )
    assert found.said == both("True 2 True None cpu 2")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(" [0]", [0]), ("[1]", [1]), (" 1", [1]), (" !0", [1]), (" 0:1", [0])]
    + [(spec, [0, 1]) for spec in (" all", " [0,1]", " [0-1]", " [0, 1]", " 0 1")],
)
def test_ranks_are_chosen(notebook: Notebook, spec: str, expected: list[int]) -> None:
    assert notebook.good(f"%%rank{spec}\nprint(rank)").said == {rank: [str(rank)] for rank in expected}


def test_ranks_that_are_not_there(notebook: Notebook) -> None:
    assert "rank 5 does not exist: expected ranks of 0-1, got [5]" in notebook.run("%%rank [5]\n1").all
    assert "2 ranks are already running" in notebook.run("%dist_init -n 2").all


def test_the_kernel_keeps_its_own_names(notebook: Notebook) -> None:
    notebook.good("x = torch.ones(3); lst = [rank]")
    assert notebook.good("%%local\nprint(x, rank, 'lst' in globals())").stdout == "5 mine False\n"
    assert "mine\n" in notebook.good("%%local\n%%time\nprint(rank)").stdout, "IPython transforms what is timed anew"


def test_mode_off_and_on(notebook: Notebook) -> None:
    notebook.good("%dist_mode off")
    assert notebook.good("print(rank)").stdout == "mine\n"
    assert notebook.good("%%rank[1]\nprint(rank)").stdout == "[1] 1\n"
    assert notebook.good("%%distributed\nprint('both')").said == both("both")
    notebook.good("%dist_mode on")
    assert notebook.good("print('both')").said == both("both")


def test_what_a_frontend_runs_for_itself_stays_in_the_kernel(notebook: Notebook) -> None:
    notebook.run("from_the_frontend = 1", silent=True)
    assert notebook.good("%%local\nprint(from_the_frontend)").stdout == "1\n"


def test_ipython_syntax_works_on_ranks(notebook: Notebook) -> None:
    assert "Wall time" in notebook.good("%time sum(range(10))").stdout
    assert notebook.good("!echo from a shell").stdout.count("from a shell") >= 1
    assert notebook.good("import asyncio\nawait asyncio.sleep(0.01)\nprint('waited')").said == both("waited")
    assert "[0-1] Docstring: Return the number of items" in notebook.good("len?").all


def test_values_cross(notebook: Notebook) -> None:
    notebook.good("t = torch.arange(3) + rank\n%dist_pull t")
    assert notebook.good("%%local\nimport torch\nprint(t.tolist())").stdout == "[0, 1, 2]\n"
    notebook.good("both = %dist_pull t --ranks all")
    assert notebook.good("%%local\nprint({r: v.tolist() for r, v in both.items()})").stdout == (
        "{0: [0, 1, 2], 1: [1, 2, 3]}\n"
    )
    notebook.good("%%local\nsettings = {'rates': [0.5, 1e-3], 'name': 'a'}")
    notebook.good("%dist_push settings")
    assert notebook.good("print(settings)").said == both("{'rates': [0.5, 0.001], 'name': 'a'}")
    assert "no_such" in notebook.run("%dist_pull no_such").all
    notebook.good("unsendable = lambda: 1")
    assert not notebook.run("%dist_pull unsendable").ok


def test_completion_and_tooltips_come_from_rank_0(notebook: Notebook) -> None:
    notebook.good("only_on_ranks = torch.nn.Linear(2, 3)")
    reply = notebook.client.complete("only_on", reply=True, timeout=10)["content"]
    assert "only_on_ranks" in reply["matches"]
    reply = notebook.client.inspect("only_on_ranks", reply=True, timeout=10)["content"]
    assert reply["found"]
    assert "Linear" in reply["data"]["text/plain"]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("cell", "status"),
    [("", "complete"), ("for i in range(2):", "incomplete"), ("%%rank 0\n1", "incomplete"), ("x = (1", "incomplete")],
)
def test_a_terminal_is_told_whether_a_cell_is_complete(notebook: Notebook, cell: str, status: str) -> None:
    asked = notebook.client.is_complete(cell)
    reply = notebook.client.get_shell_msg(timeout=20)
    assert reply["parent_header"]["msg_id"] == asked and reply["content"]["status"] == status


def test_an_error_on_all_ranks_is_one_error_and_fails_the_cell(notebook: Notebook) -> None:
    found = notebook.run("def f(n):\n    raise ValueError(f'bad {n}')\n\nf(3)")
    assert not found.ok
    lines = found.error.splitlines()
    assert "ValueError on ranks 0-1 (2 of 2)" in lines[0]
    assert any(line.startswith("----> 4") for line in lines)
    assert len(lines) <= 15


def test_a_magic_does_not_shift_the_lines_of_an_error(notebook: Notebook) -> None:
    assert "----> 3 1 / 0" in notebook.run("%%rank [1]\n\n1 / 0").error
    assert "line 4" in notebook.run("\n\n%%rank [1]\n1 / 0").error
    assert "line 2" in notebook.run("%%local\n1 / 0").error


def test_a_cell_magic_with_nothing_where_something_belongs(notebook: Notebook) -> None:
    assert "expected ranks after %%rank" in notebook.run("%%rank\n1").all
    assert not notebook.good("%%rank 0").all.strip()


def test_exit_ends_the_cell_and_not_the_ranks(notebook: Notebook) -> None:
    found = notebook.run("exit()\nprint('further')")
    assert not found.ok and "%dist_shutdown ends them" in found.error and not found.stdout
    time.sleep(0.3)  # IPython would be gone after a tenth of a second
    notebook.good("pass")


def test_bars_of_tqdm_are_text_also_where_it_would_draw_widgets(notebook: Notebook) -> None:
    pytest.importorskip("tqdm")
    code = "from tqdm.auto import tqdm\nfrom tqdm.notebook import trange\nfor _ in tqdm(range(3)): pass\n"
    found = notebook.good(code + "for _ in trange(3): pass")
    assert "3/3" in str(found.shown) + found.all


def test_what_names_a_cell_is_the_same_on_all_ranks(notebook: Notebook) -> None:
    said = notebook.good("import warnings; warnings.warn('odd'); print((lambda: 0).__code__.co_filename)").said
    assert said[0] == said[1]


def test_half_a_surrogate_pair_takes_nothing_with_it(notebook: Notebook) -> None:
    assert notebook.good(r"print('é\ud800')").said == both(r"é\ud800")


def test_breakpoint_asks(notebook: Notebook) -> None:
    notebook.client.allow_stdin = False
    try:
        found = notebook.run("breakpoint()")
    finally:
        notebook.client.allow_stdin = True
    assert "asks for input, which cannot be given here" in found.all
    notebook.good("pass")


def test_sync_needs_no_name_of_the_user(notebook: Notebook) -> None:
    notebook.good("dist = None")
    assert "all 2 ranks have arrived" in notebook.good("%sync").stdout
    notebook.good("import torch.distributed as dist")


# ---------------------------------------------------------------------------------------------------- the stop button


def test_stop_ends_a_collective_of_some_ranks_and_the_group_works_after_it(notebook: Notebook) -> None:
    notebook.good("kept = rank + 10")
    found = notebook.run("%%rank [0]\nprint('waiting')\ndist.all_reduce(torch.ones(3))", stop_at="waiting")
    assert not found.ok
    assert found.stopped_s < 5
    assert notebook.good("s = torch.ones(1); dist.all_reduce(s); print(s.item(), kept - rank)").said == both("2.0 10")


def test_a_collective_that_other_ranks_do_not_enter_is_named_within_seconds(notebook: Notebook) -> None:
    found = notebook.run("%%rank [0]\n\ndist.barrier()", stop_at="waits in barrier")
    assert not found.ok
    assert "rank 0 waits in barrier (line 3) for rank 1, which is idle" in " ".join(found.all.split())
    assert found.seconds - found.stopped_s < 10
    assert notebook.good("s = torch.ones(1); dist.all_reduce(s); print(s.item())").said == both("2.0")


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_a_replica_trains_on_after_stop(notebook: Notebook, transport: str) -> None:
    notebook.good(
        "torch.manual_seed(0)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))\n"
        f"model = paceline.DistributedDataParallel(net, transport={transport!r})\n"
        "optimizer = torch.optim.AdamW(model.parameters())"
    )
    found = notebook.run("print('training')\nwhile True:" + TRAIN.replace("\n", "\n    "), stop_at="training")
    assert not found.ok
    shown = notebook.good("import time\ntime.sleep(0.2)" + TRAIN).shown  # a cell of a few milliseconds has no panel
    assert any("forward" in str(one.get("text/plain")) for one in shown), "the panel"
    notebook.good("weights = [p.detach() for p in model.parameters()]")
    notebook.good("weights = %dist_pull weights -r all")
    assert notebook.good("%%local\nprint(all(map(torch.equal, *weights.values())))").stdout == "True\n"


# --------------------------------------------------------------------------------------------------------- lost ranks


def test_a_rank_that_dies_is_named_and_brought_back(notebook: Notebook) -> None:
    found = notebook.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert not found.ok
    assert "rank 1 was killed by SIGKILL" in found.all
    assert "bring it back with %dist_restart 1" in notebook.run("print(rank)").all
    assert notebook.good("%%rank [0]\nprint(kept)").stdout == "[0] 10\n"
    notebook.good("%dist_restart 1")
    assert notebook.good("print(kept if rank == 0 else 'kept' in globals())").said == {0: ["10"], 1: ["False"]}
    assert notebook.good("s = torch.ones(1); dist.all_reduce(s); print(s.item())").said == both("2.0")


def test_a_death_and_a_stop_while_ranks_start(notebook: Notebook) -> None:
    pid = pids(notebook)[0]
    found = notebook.run("%dist_restart 1", when={"starting Python": lambda: os.kill(pid, signal.SIGKILL)})
    assert "rank 0 died while others started: it was killed by SIGKILL" in found.all and found.seconds < 25
    found = notebook.run("%dist_restart all", stop_at="starting Python")
    assert found.error == "KeyboardInterrupt: %dist_restart was stopped"
    notebook.good("%dist_restart all")


def test_kill_and_reset(notebook: Notebook) -> None:
    before = pids(notebook)
    notebook.good("%dist_kill 1")
    # Who killed it need not be told. The other one dies while it answers.
    notebook.good(
        "%%rank 0\nimport os\nfrom paceline.notebook.rank import rank_requests\n"
        "rank_requests.pack = lambda *_: os._exit(7)"
    )
    assert "rank 0 exited with 7" in notebook.run("%dist_pull rank").stderr
    assert "dead" in notebook.good("%dist_status").stdout
    notebook.good("%dist_reset")
    assert gone_within(before, 2.0)
    assert "NameError" in notebook.run("kept").all


def test_ten_megabytes_of_output_do_no_harm(notebook: Notebook) -> None:
    found = notebook.good("for i in range(100_000): print(i, 'x' * 45)\nprint('the end')")
    assert "the end" in found.stdout
    assert len(found.stdout) < 2_000_000
    assert notebook.good("print(1)").said == both("1")


def test_shutdown_ends_the_ranks_and_cells_run_here_again(notebook: Notebook) -> None:
    before = pids(notebook)
    assert len(before) == 2
    notebook.good("%dist_shutdown")
    assert gone_within(before, 2.0)
    assert notebook.good("print(rank)").stdout == "mine\n"


def test_a_restart_of_the_kernel_leaves_no_process(notebook: Notebook) -> None:
    notebook.good("%dist_init -n 2")
    notebook.good("import subprocess; child = subprocess.Popen(['sleep', '1000']); pid = child.pid")
    children = notebook.good("%dist_pull pid -r all").shown[-1]["text/plain"]
    before = [*pids(notebook), *map(int, re.findall(r"\d{2,}", children))]
    assert len(before) == 4
    notebook.kernel.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=30)
    assert gone_within(before, 3.0)


def test_the_extension_can_be_taken_out(notebook: Notebook) -> None:
    notebook.good("%load_ext paceline")
    notebook.good("%dist_init -n 1")
    before = pids(notebook)
    notebook.good("%unload_ext paceline")
    assert gone_within(before, 2.0)
    assert "not found" in notebook.run("%dist_status").all


def test_the_cells_of_the_readme(notebook: Notebook) -> None:
    cells = re.findall(r"^```ipython\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) == 3
    *_, last = [notebook.good(cell) for cell in cells]
    assert {rank: line[-1].partition(" on ")[2] for rank, line in last.said.items()} == {
        0: "rank 0 of 2",
        1: "rank 1 of 2",
    }
    assert any("forward" in str(one.get("text/plain")) for one in last.shown), "the panel"


def test_exit_in_a_terminal_leaves_ipython() -> None:
    session = NotebookSession()
    session.mode_on = True
    for cell in ("exit\n", "quit()\n"):
        assert Router(session, lambda: False, in_terminal=True)([cell]) == [cell]
        assert Router(session, lambda: False)([cell]) != [cell]
