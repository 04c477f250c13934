"""Local ranks that run a command: their status, the error that ended them, signals, and the end of who started them.

Most ranks here are stand-ins that know nothing of torch, so that a test takes a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.world import local_ranks
from weft.world.local_ranks import run_ranks

pytestmark = pytest.mark.processes
SECONDS = 60.0  # until a wait is given up

# A rank that has joined. It counts the signals it gets in a file of the folder that the test gave it.
RANK = """
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
private = os.environ["WEFT_LOCAL_RANK"].split(",", 2)[2]
def take(number, frame):
    with open(f"{folder}/signals-{rank}", "a") as file:
        file.write(f"{number} ")
def handle():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, take)
def join():
    open(f"{private}/joined-{rank}", "w").close()
def ready():
    with open(f"{folder}/draft-{rank}", "w") as file:
        file.write(f"{os.getpid()} {os.getsid(0)} {oct(os.stat(private).st_mode & 0o777)} {private}")
    os.replace(f"{folder}/draft-{rank}", f"{folder}/ready-{rank}")
def fail(when, text):
    with open(f"{private}/failure-{rank}", "w") as file:
        file.write(f"{when} {text}")
def signals():
    try:
        return open(f"{folder}/signals-{rank}").read().split()
    except FileNotFoundError:
        return []
def until(done):
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
"""


def command(folder: Path, program: str) -> list[str]:
    return [sys.executable, "-c", RANK + program, str(folder)]


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def facts_of(folder: Path, count: int) -> list[list[str]]:
    """(process, session, mode of the private folder, that folder) of each rank, when all are ready."""
    files = [folder / f"ready-{rank}" for rank in range(count)]
    wait_for(lambda: all(file.exists() for file in files))
    return [file.read_text().split() for file in files]


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Sender(threading.Thread):
    """Sends signals to this process when the ranks are ready for them."""

    def __init__(self, folder: Path, count: int, *numbers: int, after: Callable[[], bool] = lambda: True) -> None:
        super().__init__(daemon=True)
        self.folder, self.count, self.numbers, self.after = folder, count, numbers, after
        self.start()

    def run(self) -> None:
        facts_of(self.folder, self.count)
        for number in self.numbers:
            os.kill(os.getpid(), number)
            wait_for(self.after)


def test_all_end_well_and_nothing_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks have a session and a folder of their own; rank 0 has the terminal."""
    program = 'ready(); print("out", rank, os.environ["WORLD_SIZE"]); print("err", rank, file=sys.stderr)'
    assert run_ranks(command(tmp_path, program), 2, "test") == 0
    out = capfd.readouterr()
    assert sorted(out.out.splitlines()) == ["out 0 2", "out 1 2"] and out.err == "err 0\n"
    for process, session, mode, private in facts_of(tmp_path, 2):
        assert process == session and mode == "0o700" and not Path(private).exists()


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(local_ranks, "GRACE", 0.3)
    program = """
ready()
if rank == 1:
    until(lambda: all(os.path.exists(f"{folder}/ready-{other}") for other in range(3)))
    sys.exit("what went wrong")
time.sleep(600)
"""
    assert run_ranks(command(tmp_path, program), 3, "test") == 1
    assert capfd.readouterr().err == "test: rank 1 of 3 ended with status 1: what went wrong\n"
    assert not any(lives(int(facts[0])) for facts in facts_of(tmp_path, 3))


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        # Rank 1 fails first; rank 0 says of it only that it is gone.
        ("fail(2 - rank, 'E: ' + str(rank)); sys.exit('gone' if rank == 0 else 'the cause')", 1,
         ["gone", "test: rank 1 of 2 ended with status 1: the cause"]),
        # The same error on all ranks: rank 0 has shown it.
        ("fail(2 - rank, 'E: same'); sys.exit('same')", 1, ["same"]),
        # An error that only rank 0 would have shown.
        ("fail(2 - rank, 'E: ' + str(rank)); sys.exit(2 + rank)", 3, ["test: rank 1 of 2 ended with status 3: E: 1"]),
        ("os.kill(os.getpid(), signal.SIGSEGV) if rank else (fail(0, 'E: gone'), sys.exit('gone'))", 128 + 11,
         ["gone", "test: rank 1 of 2 was ended by SIGSEGV"]),
    ],
    ids=["cause", "same", "worded", "killed"],
)  # fmt: skip
def test_the_error_that_ended_it_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str, status: int, said: list[str]
) -> None:
    assert run_ranks(command(tmp_path, program), 2, "test") == status
    assert capfd.readouterr().err.splitlines() == said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_waited_for(tmp_path: Path, number: int) -> None:
    """Twice within a moment is once; ranks that end later than others have the time, with any status."""
    Sender(tmp_path, 2, number, number)
    program = "handle(); join(); ready(); until(signals); time.sleep(0.3 * rank); sys.exit(77)"
    assert run_ranks(command(tmp_path, program), 2, "test") == 77
    assert [(tmp_path / f"signals-{rank}").read_text().split() for rank in range(2)] == [[str(int(number))]] * 2


def test_a_second_signal_ends_all_at_once(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    taken = [tmp_path / f"signals-{rank}" for rank in range(2)]
    monkeypatch.setattr(local_ranks, "SAME_SIGNAL", 0.0)  # no need to wait a second for the other one
    Sender(tmp_path, 2, signal.SIGTERM, signal.SIGTERM, after=lambda: all(file.exists() for file in taken))
    begun = time.monotonic()
    assert run_ranks(command(tmp_path, "handle(); join(); ready(); time.sleep(600)"), 2, "test") == 128 + 15
    assert time.monotonic() - begun < SECONDS and [file.read_text().split() for file in taken] == [["15"]] * 2
    assert not any(lives(int(facts[0])) for facts in facts_of(tmp_path, 2))


def test_patience_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Sender(tmp_path, 2, signal.SIGTERM)
    assert run_ranks(command(tmp_path, "handle(); join(); ready(); time.sleep(600)"), 2, "test", 0.3) == 128 + 15
    assert capfd.readouterr().err == "test: SIGTERM: not done after 0.3 s, ended\n"
    assert not any(lives(int(facts[0])) for facts in facts_of(tmp_path, 2))


def test_a_signal_before_all_have_joined_ends_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They import torch then; nothing is lost, and no rank shows where it was."""
    Sender(tmp_path, 2, signal.SIGINT)
    assert run_ranks(command(tmp_path, "rank or join(); ready(); time.sleep(600)"), 2, "test") == 128 + 2
    assert capfd.readouterr().err == "test: SIGINT: ended before all ranks had begun\n"
    assert not any(lives(int(facts[0])) for facts in facts_of(tmp_path, 2))


def test_who_is_told_to_ignore_signals_does(tmp_path: Path) -> None:
    """As nohup and background jobs of a shell are."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Sender(tmp_path, 2, signal.SIGINT)
        program = "ready(); sys.exit(0 if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else 1)"
        assert run_ranks(command(tmp_path, program), 2, "test") == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_ranks(command(tmp_path, ""), 1, "test")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("count", [0, -1, 1_000_000])
def test_too_many_and_too_few(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match=f"test: ranks must be at least 1 and at most 512 on one machine, got {count}"):
        run_ranks(command(tmp_path, "ready()"), count, "test")
    assert not list(tmp_path.iterdir())


JOINED = """
import os, sys, time
from pathlib import Path
from weft.parallel.rendezvous import joined_world
with joined_world() as axis:
    line = f'{axis.rank} {os.getpid()} {os.environ["WEFT_LOCAL_RANK"].split(",", 2)[2]}\\n'
    os.write(1, line.encode())  # in one piece: both ranks write to one pipe
    time.sleep(600)
"""


def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    """Killed, it cannot tell them; their private folder goes, too."""
    program = "import sys; from weft.world.local_ranks import run_ranks; run_ranks(sys.argv[1:], 2, 'test')"
    starter = subprocess.Popen(
        [sys.executable, "-c", program, sys.executable, "-c", JOINED], stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        ranks = sorted(starter.stdout.readline().split() for _ in range(2))
        assert [rank for rank, *_ in ranks] == ["0", "1"]
        starter.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(lives(int(process)) for _, process, _ in ranks))
        assert not Path(ranks[0][2]).exists()
    finally:
        starter.kill()
        starter.wait()
