"""`paceline run` with real ranks that load no torch: what it shows, how it ends, and that nothing is left behind."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.launch import spans

PATIENCE_S = 20.0


class Launcher:
    """A running `paceline run`."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.folder = folder

    def await_file(self, name: str) -> str:
        path = self.folder / name
        until = time.monotonic() + PATIENCE_S
        while not path.exists() or not path.read_text():
            assert time.monotonic() < until, f"{name} never came"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return path.read_text()

    def await_line(self, text: str, ranks: int = 1) -> None:
        """Wait until all ranks have printed `text`. Only for scripts that print little."""
        assert self.process.stdout is not None
        seen, until = "", time.monotonic() + PATIENCE_S
        descriptor = self.process.stdout.fileno()
        while not says(seen, text, ranks):
            assert time.monotonic() < until, seen
            if select.select([descriptor], [], [], 0.1)[0]:
                data = os.read(descriptor, 4096)
                assert data, seen
                seen += data.decode()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


def says(out: str, text: str, ranks: int = 2) -> bool:
    """Whether all ranks have printed the line `text`. On a busy machine they do not come to it within folding time."""
    gutters = {gutter for gutter, line in re.findall(r"^\[([\d,-]+)\] (.*)\n", out, re.MULTILINE) if line == text}
    return bool(gutters & {spans(range(ranks))}) or gutters >= set(map(str, range(ranks)))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """`launch(script, *flags, arguments=())` starts `paceline run`; whatever is left at the end is killed."""
    started: list[Launcher] = []

    def start(script: str, *flags: str, arguments: tuple[str, ...] = (), **environment: str) -> Launcher:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\nfrom pathlib import Path\n" + textwrap.dedent(script))
        command = [sys.executable, "-m", "paceline.cli", "run", "--log-dir", str(tmp_path / "runs"), *flags, str(path)]
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
        started.append(Launcher(process, tmp_path))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def await_death(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------- what ranks are given


def test_environment_and_arguments(launch: Callable[..., Launcher]) -> None:
    script = """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK ROLE_RANK ROLE_WORLD_SIZE"
        print(os.environ["RANK"], *(os.environ[name] for name in names.split()))
        rest = "MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID OMP_NUM_THREADS "
        print("all", *(os.environ[name] for name in (rest + "GLOO_SOCKET_IFNAME CUDA_VISIBLE_DEVICES").split()))
        print(sys.argv[1:], int(os.environ["MASTER_PORT"]) > 0)
    """
    launcher = launch(
        script,
        "--nproc_per_node=2",
        "--rdzv-id",
        "job",
        "--gpu-ids",
        "3,1",
        "--max_restarts",
        "2",
        arguments=("--nproc-per-node", "9", "--", "-x"),
        OMP_NUM_THREADS="",
    )
    code, out, err = launcher.end()
    assert code == 0, err
    assert "[0] 0 0 0 2 2 0 0 0 2\n" in out
    assert "[1] 1 1 1 2 2 0 0 1 2\n" in out
    assert says(out, "all 127.0.0.1 0 2 job  lo 3,1")
    assert says(out, "['--nproc-per-node', '9', '--', '-x'] True")
    assert sorted(path.name for path in (launcher.folder / "runs" / "job").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_modules_programs_and_input(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print('module', sys.argv[1:], input())")
    command = [sys.executable, "-m", "paceline.cli", "run", "--log-dir", str(tmp_path / "runs"), "-n", "1"]
    done = subprocess.run(
        [*command, "-m", "tool", "-n", "5"], input="typed\n", capture_output=True, text=True, cwd=tmp_path, timeout=20
    )
    assert done.stdout == "[0] module ['-n', '5'] typed\n", done.stderr
    done = subprocess.run(
        [*command, "-np", "2", "--no-python", "echo", "hi"], capture_output=True, text=True, cwd=tmp_path, timeout=20
    )
    assert done.stdout in ("[0-1] hi\n", "[0] hi\n[1] hi\n", "[1] hi\n[0] hi\n")


# ---------------------------------------------------------------------------------------------------- how failures look


@pytest.mark.parametrize(
    ("fall", "words"),
    [
        ('ValueError("no such thing")', "ValueError: no such thing"),
        ('ExceptionGroup("two", [ValueError("no such thing"), KeyError(1)])', "ExceptionGroup: two (2 sub-exceptions)"),
    ],
)
def test_one_error_on_all_ranks_is_shown_once(launch: Callable[..., Launcher], fall: str, words: str) -> None:
    script = f"""
        def down(n):
            if n == 0:
                raise {fall}
            down(n - 1)
        down(30)
    """
    code, out, err = launch(script, "-n", "4").end()
    assert code == 1
    assert err.count("ValueError: no such thing") == err.count(words) == 1
    assert err.startswith(f"paceline run: ranks 0-3 raised {words}\n")
    assert len(err.splitlines()) <= 15
    assert "Traceback" not in out + err


def test_the_cause_is_shown_and_not_those_who_fell_with_it(launch: Callable[..., Launcher]) -> None:
    # The followers end first, and the one at fault takes its time to die.
    script = """
        class PeerLost(RuntimeError): pass
        rank, cause, followers = os.environ["RANK"], Path("cause"), [Path("follower0"), Path("follower2")]
        def wait(*files):
            while not all(file.exists() for file in files):
                time.sleep(0.01)
        if rank == "1":
            try:
                raise KeyError("the real one")
            finally:
                cause.touch()
                wait(*followers)
                time.sleep(0.8)
        wait(cause)
        Path("follower" + rank).touch()
        raise PeerLost("rank 1 died")
    """
    code, _, err = launch(script, "-n", "3").end()
    assert code == 1
    assert err.startswith("paceline run: rank 1 raised KeyError: 'the real one'\n")
    assert "afterwards ranks 0,2 raised PeerLost" in err


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 exited with code 7"),
        ("sys.exit('all is lost')", 1, "all is lost"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_exit_codes(launch: Callable[..., Launcher], deed: str, code: int, words: str) -> None:
    script = f"""
        if os.environ["RANK"] == "1":
            {deed}
        signal.pause()
    """
    found, _, err = launch(script, "-n", "2").end()
    assert found == code
    assert words in err
    assert len(err.splitlines()) <= 15


def test_a_caught_traceback_is_shown_and_is_no_cause(launch: Callable[..., Launcher]) -> None:
    script = """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        time.sleep(0.5)
        print("going on", file=sys.stderr)
        if sys.argv[1:] and os.environ["RANK"] == "0":
            sys.exit(9)
        if sys.argv[1:]:
            signal.pause()
    """
    code, _, err = launch(script, "-n", "2").end()
    assert code == 0
    assert err.index("ZeroDivisionError: division by zero") < err.index("going on")
    code, _, err = launch(script, "-n", "2", arguments=("fail",)).end()
    assert code == 9
    assert "paceline run: rank 0 exited with code 9\n" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-n", "2", "missing.py"], "the script 'missing.py' does not exist"),
        (["-n", "two", "script.py"], "--nproc-per-node two: expected a whole number of at least 1, or auto, gpu, cpu"),
        (["-n", "0", "script.py"], "--nproc-per-node 0: expected"),
        (["-n", "3", "--gpu-ids", "0,1", "script.py"], "3 ranks need 3 GPUs, got 2"),
        (["--gpu-ids", "0,x", "script.py"], "--gpu-ids '0,x': expected comma-separated numbers"),
        (["--nnodes", "2", "script.py"], "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"),
        (["--nnodes", "some", "script.py"], "--nnodes some: expected a whole number of at least 1"),
        (["--node-rank", "1", "script.py"], "--node-rank 1: expected 0"),
        (["--nnodes", "1", "--rdzv-endpoint", "a:b", "script.py"], "--rdzv-endpoint a:b: expected HOST:PORT"),
        (["--master-port", "99999", "script.py"], "master_port must be at most 65535"),
        (["--hang-timeout", "soon", "script.py"], "--hang-timeout soon: expected a number of seconds"),
        (
            ["-n", "2", "--local-ranks-filter", "0,2", "script.py"],
            "--local-ranks-filter 0,2: there is no rank 2; expected ranks among 0 to 1",
        ),
        (["--no-python", "no-such-program"], "the program 'no-such-program' was not found"),
        (["--frobnicate", "script.py"], "--frobnicate"),
        (["-n", "2"], "no script was given"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "script.py").write_text("print('must not run')")
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "run", *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=20,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_one_line(launch: Callable[..., Launcher]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = launch("print('ran')", "--master-port", str(port)).end()
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"paceline run: port {port} of 127.0.0.1 cannot be used: .*\n", err)


def test_logs_that_cannot_be_written_are_one_line(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    code, out, err = launch("print('ran')", "-n", "2").end()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "cannot be written: Not a directory; choose another folder, for instance with --log-dir" in err


def test_a_log_that_is_full_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nif os.environ['RANK'] == '0': print('x' * 2000)\nprint('second')")
    # No file gets more than a kilobyte. To the launcher that is an error of the disk, as one that is full.
    words = f"ulimit -f 1; {shlex.quote(sys.executable)} -m paceline.cli run -n 2 --rdzv-id job script.py"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert says(done.stdout, "second")
    assert "rank_0.log is no longer written: File too large" in done.stderr
    assert (tmp_path / "runs" / "job" / "rank_1.log").read_text() == "second\n"


def test_a_link_in_the_place_of_a_log_is_not_followed(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    folder, precious = tmp_path / "runs" / "job", tmp_path / "precious"
    folder.mkdir(parents=True)
    precious.write_text("it stays")
    (folder / "rank_0.log").symlink_to(precious)
    code, out, err = launch("print('ran')", "-n", "2", "--rdzv-id", "job").end()
    assert (code, out) == (2, "")
    assert "rank_0.log cannot be written: Too many levels of symbolic links; choose another folder" in err
    assert precious.read_text() == "it stays"


@pytest.mark.parametrize(("number", "other"), [(1, 2), (2, 1)])
def test_a_closed_stream_does_not_end_the_run(tmp_path: Path, number: int, other: int) -> None:
    (tmp_path / "script.py").write_text("import sys; print('out'); print('err', file=sys.stderr)")
    words = f"{shlex.quote(sys.executable)} -m paceline.cli run -n 2 script.py {number}>&-"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert says({1: done.stdout, 2: done.stderr}[other], {1: "out", 2: "err"}[other])
    (log,) = tmp_path.glob("runs/*/rank_1.log")
    assert sorted(log.read_text().splitlines()) == ["err", "out"]


def test_output_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('first', flush=True)")
    words = f"{shlex.quote(sys.executable)} -m paceline.cli run -n 2 script.py >/dev/full"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "paceline run: output can no longer be shown: No space left on device; the logs are complete\n"
    )


def test_too_few_open_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('must not run')")
    words = f"ulimit -n 64; {shlex.quote(sys.executable)} -m paceline.cli run -n 16 script.py"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"paceline run: 16 ranks need \d+ open files .* limit is 64; raise .* `ulimit -n 1024`.*\n", done.stderr
    )


def test_what_may_surprise_is_noted(launch: Callable[..., Launcher]) -> None:
    code, out, err = launch("print(sys.argv[1:])", arguments=("-n", "2")).end()
    assert (code, out) == (0, "[0] ['-n', '2']\n")
    assert "-n comes after " in err and "script.py, so it is passed to the script, and one rank is started" in err
    code, _, err = launch("", "--gpu-ids", "998,999").end()
    assert code == 0
    assert err.startswith("paceline run: --gpu-ids 998,999: this machine has ")


def test_an_early_interrupt_leaves_no_traceback(tmp_path: Path) -> None:
    """While modules are being imported: here, in the middle of one."""
    code = (
        "import os, signal, sys; from paceline import cli; from importlib import abc\n"
        "class Finder(abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'paceline.launch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder()); sys.argv[1:] = ['run', __file__]; cli.main()\n"
    )
    (tmp_path / "early.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "early.py"], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_killed_reaper_takes_the_ranks_along_and_they_start_again(launch: Callable[..., Launcher]) -> None:
    script = """
        import subprocess
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        mine = Path(f"pids{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
        Path(f"{mine}.tmp").write_text(f"{os.getpid()} {sleeper.pid} {os.getppid()}")
        Path(f"{mine}.tmp").rename(mine)
        signal.pause()
    """
    launcher = launch(script, "-n", "2", "--max-restarts", "1")
    killed: list[int] = []
    for attempt in range(2):
        pids = [list(map(int, launcher.await_file(f"pids{rank}-{attempt}").split())) for rank in range(2)]
        assert not [pid for pid in killed if alive(pid)], "nothing of the first attempt may meet the second"
        os.kill(pids[0][2], signal.SIGKILL)
        killed = [*pids[0], *pids[1]]
    code, _, err = launcher.end()
    assert code == 1
    gone = "the reaper process was killed, and the kernel killed the ranks with it"
    assert err == f"paceline run: {gone}; restart 1: all ranks start again\npaceline run: {gone}\n"
    assert not [pid for pid in killed if alive(pid)]


# -------------------------------------------------------------------------------------------------------------- signals

CHILDREN = """
    import subprocess
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    own = subprocess.Popen(sleeper)
    away = subprocess.Popen(sleeper, start_new_session=True)
    mine = Path(f"pids{os.environ['RANK']}.tmp")
    mine.write_text(f"{os.getpid()} {own.pid} {away.pid} {os.getppid()}")
    mine.rename(mine.with_suffix(""))
"""


def all_pids(launcher: Launcher, ranks: int = 2) -> list[int]:
    return [int(pid) for rank in range(ranks) for pid in launcher.await_file(f"pids{rank}").split()]


def test_nothing_survives_a_killed_launcher(launch: Callable[..., Launcher]) -> None:
    # Ranks that ignore what can be ignored, children of their own, and children that left the session.
    ignore = "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)\n"
    launcher = launch(ignore + textwrap.dedent(CHILDREN) + "signal.pause()", "-n", "2")
    pids = all_pids(launcher)
    launcher.process.kill()
    await_death(pids)


def test_nothing_survives_a_finished_run(launch: Callable[..., Launcher]) -> None:
    launcher = launch(textwrap.dedent(CHILDREN), "-n", "2")
    code, _, err = launcher.end()
    assert code == 0, err
    pids = [int(pid) for rank in range(2) for pid in (launcher.folder / f"pids{rank}").read_text().split()]
    assert not [pid for pid in pids if alive(pid)]


def test_ctrl_c_gives_ranks_a_moment(launch: Callable[..., Launcher]) -> None:
    script = """
        Path("up" + os.environ["RANK"]).write_text("x")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
            raise
    """
    launcher = launch(script, "-n", "2")
    launcher.await_file("up0"), launcher.await_file("up1")
    launcher.process.send_signal(signal.SIGINT)
    code, out, err = launcher.end()
    assert code == 130
    assert says(out, "saved")
    assert "Traceback" not in err


def test_a_second_ctrl_c_kills(launch: Callable[..., Launcher]) -> None:
    script = """
        signal.signal(signal.SIGINT, lambda *_: print("not now", flush=True))
        Path("up").write_text("x")
        while True:
            time.sleep(600)
    """
    launcher = launch(script, "-n", "1")
    launcher.await_file("up")
    launcher.process.send_signal(signal.SIGINT)
    launcher.await_line("not now")
    asked = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end()[0] == 130
    assert time.monotonic() - asked < 4


def test_sigterm_and_sigusr1_are_passed_on(launch: Callable[..., Launcher]) -> None:
    script = """
        def on_usr1(*_):
            print("checkpoint", flush=True)
        def on_term(*_):
            print("leaving", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGUSR1, on_usr1)
        signal.signal(signal.SIGTERM, on_term)
        Path("up" + os.environ["RANK"]).write_text("x")
        while True:
            time.sleep(600)
    """
    launcher = launch(script, "-n", "2", "--max-restarts", "3")
    launcher.await_file("up0"), launcher.await_file("up1")
    launcher.process.send_signal(signal.SIGUSR1)
    launcher.await_line("checkpoint", 2)
    launcher.process.send_signal(signal.SIGTERM)
    code, out, err = launcher.end()
    assert code == 0
    assert says(out, "leaving")
    assert "restart" not in err


def test_a_rank_that_will_not_go_is_killed(launch: Callable[..., Launcher]) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("up").write_text("x")
        while True:
            time.sleep(600)
    """
    launcher = launch(script, "-n", "1", "--shutdown-timeout", "0.3")
    launcher.await_file("up")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end()[0] == 137


# ------------------------------------------------------------------------------------------------------------- restarts


def test_restarts(launch: Callable[..., Launcher]) -> None:
    script = """
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", count, flush=True)
        with open("ports", "a") as file:
            file.write(os.environ["MASTER_PORT"] + "\\n")
        if count < 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if count < 2:
            signal.pause()
    """
    launcher = launch(script, "-n", "2", "--max-restarts", "3")
    code, out, err = launcher.end()
    assert code == 0, err
    assert "paceline run: rank 1 was killed by SIGKILL; restart 1: all ranks start again\n" in err
    assert "restart 2: all ranks start again\n" in err
    assert says(out, "attempt 2")
    assert "--- restart 2 ---" in next(launcher.folder.glob("runs/*/rank_0.log")).read_text()
    assert len(set((launcher.folder / "ports").read_text().split())) == 3


def test_restarts_end(launch: Callable[..., Launcher]) -> None:
    code, _, err = launch("sys.exit(5)", "-n", "2", "--max-restarts", "1").end()
    assert code == 5
    assert err.count("all ranks start again") == 1
    assert "paceline run: ranks 0-1 exited with code 5\nfull logs" in err


RETURNS = """
    import atexit
    from paceline.progress import own_progress
    over = sys.argv[1] != "busy"
    own_progress().note_end(lambda: over)
    if os.environ["RANK"] == "1":
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    if sys.argv[1] == "raises":
        raise ValueError("after its work")
"""


def test_a_crash_at_exit_after_the_work_is_no_failure(launch: Callable[..., Launcher]) -> None:
    code, _, err = launch(RETURNS, "-n", "2", "--max-restarts", "1", arguments=("returns",)).end()
    assert (code, err.count("all ranks start again")) == (0, 0), err
    said = [line for line in err.splitlines() if line.startswith("paceline run: ")]
    assert said == ["paceline run: rank 1 was killed by SIGSEGV during exit, after its work was done"], err


@pytest.mark.parametrize("how", ["raises", "busy"])
def test_a_crash_at_exit_of_unfinished_work_is_one(launch: Callable[..., Launcher], how: str) -> None:
    """`busy` is a script that returned while its process group was still there, as it does after an error."""
    code, _, err = launch(RETURNS, "-n", "2", arguments=(how,)).end()
    assert code in (1, 139), err
    assert "after its work was done" not in err


# ------------------------------------------------------------------------------------------------------------- watchdog

STEPS = """
    from paceline.progress import Phase, own_progress
    progress = own_progress()
    rank = int(os.environ["RANK"])
    for step in range(20):
        progress.note(Phase.FORWARD, step)
        time.sleep(0.02)
"""


@contextmanager
def steps(launch: Callable[..., Launcher], then: str, *flags: str) -> Iterator[Launcher]:
    yield launch(textwrap.dedent(STEPS) + textwrap.dedent(then), "-n", "2", *flags)


def test_a_stopped_rank_is_named(launch: Callable[..., Launcher]) -> None:
    then = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        progress.note(Phase.WAITING, step)
        time.sleep(600)
    """
    started = time.monotonic()
    with steps(launch, then, "--shutdown-timeout", "2") as launcher:
        code, _, err = launcher.end()
    assert code == 124
    assert err.startswith("paceline run: rank 1 froze: stopped for "), err
    assert "at step 19" in err
    assert time.monotonic() - started < 10


def test_a_spinning_rank_is_named_with_its_place(launch: Callable[..., Launcher]) -> None:
    then = """
        def spin():
            while True:
                pass
        if rank == 1:
            Path("spins").touch()
            spin()
        while not Path("spins").exists():  # the one at fault stands still first, however late it comes
            progress.note(Phase.FORWARD, step)
            time.sleep(0.01)
        progress.note(Phase.WAITING, step)
        time.sleep(600)
    """
    with steps(launch, then, "--hang-timeout", "1.5", "--shutdown-timeout", "2") as launcher:
        code, _, err = launcher.end()
    assert code == 124
    assert err.startswith("paceline run: rank 1 is busy but making no progress: no progress for "), err
    assert "in spin" in err, "the stack of the rank is shown"


def test_a_sleeping_rank_is_named(launch: Callable[..., Launcher]) -> None:
    then = """
        if rank == 0:
            progress.note(Phase.DATA, 19)
            Path("sleeps").touch()
        while not Path("sleeps").exists():  # the one at fault stands still first, however late it comes
            progress.note(Phase.FORWARD, step)
            time.sleep(0.01)
        if rank == 1:
            progress.note(Phase.BACKWARD, 20)
        time.sleep(600)
    """
    with steps(launch, then, "--hang-timeout", "1.5", "--shutdown-timeout", "2") as launcher:
        code, _, err = launcher.end()
    assert code == 124
    assert err.startswith("paceline run: rank 0 froze: no progress for "), err


def test_slow_scripts_of_others_are_left_alone(launch: Callable[..., Launcher]) -> None:
    code, _, err = launch("time.sleep(1.2)", "-n", "2", "--hang-timeout", "0.3").end()
    assert code == 0, err


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group, of either version, whose processes may use 200 MB."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else old.parent) / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
        limit.write_text(str(200 << 20))
        yield group
        until = time.monotonic() + PATIENCE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.01)
    except (StopIteration, OSError) as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    finally:
        group.rmdir()


def test_the_kernel_killing_for_memory_is_told(memory_group: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    hog = bytes(os.urandom(1 << 20)) * 512\nsignal.pause()\n"
    )
    # The launcher is inside the limited group itself, as in a container.
    enter = f"import os; open({str(memory_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    command = enter + "from paceline.cli.run_command import main; raise SystemExit(main(__import__('sys').argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "-n", "2", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 137
    assert "rank 1 was killed by the OOM killer" in done.stderr
