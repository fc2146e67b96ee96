"""A process that tries something for a command: waited for as long as it moves, ended and named when it stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from midflight.run.launcher import trial
from midflight.run.launcher.trial import TrialFailed, TrialWait, answer_of

STALL = 1.0
PRELUDE = "from midflight.run.launcher.trial import trying\nimport os, sys, time\n"


def script(folder: Path, body: str) -> Sequence[str]:
    path = folder / "tried.py"
    path.write_text(PRELUDE + body)
    return [sys.executable, str(path)]


def patience(said: list[str] | None = None, *, stall: float = STALL) -> TrialWait:
    heard = list[str]() if said is None else said
    return TrialWait("trying it", stall, say=heard.append)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LOOK_SECONDS", 0.1)


def test_the_last_line_is_the_answer_and_prints_are_none(tmp_path: Path) -> None:
    body = """
with trying() as trial:
    trial.doing("prints")
    print("not an answer")
    os.write(1, b"nor this")
    given = sys.stdin.read()
    trial.answer(given.upper().encode())
"""
    assert answer_of(script(tmp_path, body), patience(), given=b"[1, 2, 'abc']" * 100_000) == b"[1, 2, 'ABC']" * 100_000


def test_no_trial_gets_what_opens_the_run_or_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIDFLIGHT_CONTROL_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "secret")
    body = "with trying() as trial:\n    trial.answer(str('secret' in os.environ.values()).encode())"
    assert answer_of(script(tmp_path, body), patience()) == b"False"
    assert answer_of(script(tmp_path, body), patience(), environ=dict(os.environ)) == b"False"


def test_a_slow_import_that_computes_is_waited_for_three_times_the_bound_and_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "WORD_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text(f"import time\nend = time.process_time() + {3 * STALL}\nwhile time.process_time() < end: pass")
    body = "with trying() as trial:\n    trial.doing('imports slow')\n    import slow\n    trial.answer(b'1')"
    said = list[str]()
    assert answer_of(script(tmp_path, body), patience(said)) == b"1"
    words = [line for line in said if line.startswith("trying it: imports slow, for ")]
    assert words and "has done nothing" not in words[-1], said


def test_what_a_child_of_it_computes_counts_too(tmp_path: Path) -> None:
    burn = f"import time\nend = time.process_time() + {3 * STALL}\nwhile time.process_time() < end: pass"
    body = f"import subprocess\nwith trying() as trial:\n    subprocess.run([sys.executable, '-c', {burn!r}])\n    trial.answer(b'1')"
    assert answer_of(script(tmp_path, body), patience()) == b"1"


def test_a_trial_that_goes_on_saying_something_else_is_waited_for(tmp_path: Path) -> None:
    body = f"""
with trying() as trial:
    for number in range(6):
        trial.doing(f"asks for {{number}}")
        time.sleep({STALL / 2})
    trial.answer(b"1")
"""
    assert answer_of(script(tmp_path, body), patience()) == b"1"


@pytest.mark.parametrize("wait", ["time.sleep(1e9)", "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"])
def test_a_module_that_sleeps_or_waits_for_a_lock_is_named_with_its_line(tmp_path: Path, wait: str) -> None:
    (tmp_path / "hanging.py").write_text(f"import time\nprint('almost there', flush=True)\n{wait}\n")
    body = "with trying() as trial:\n    trial.doing('imports hanging')\n    import hanging"
    with pytest.raises(TrialFailed) as failed:
        answer_of(script(tmp_path, body), patience())
    said = str(failed.value)
    assert "while it imports hanging: it took no processor time" in said and "raise run.stall_seconds" in said
    assert 'hanging.py", line 3 in <module>' in said.partition("It stands at:")[2]
    assert said.endswith("The last it said:\nalmost there")


def test_the_line_of_the_users_own_code_is_shown_where_a_library_waits(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text("import socket\n\na, b = socket.socketpair()\na.makefile('r').readline()\n")
    with pytest.raises(TrialFailed) as failed:
        answer_of(script(tmp_path, "with trying() as trial:\n    import asking"), patience())
    assert str(failed.value).partition("It stands at:\n")[2].startswith(f'File "{tmp_path}/asking.py", line 4 in <module>')


def test_a_trial_that_is_stopped_is_found(tmp_path: Path) -> None:
    body = "import signal\nwith trying() as trial:\n    trial.doing('stops')\n    os.kill(os.getpid(), signal.SIGSTOP)"
    with pytest.raises(TrialFailed, match="did nothing for 1 s while it stops"):
        answer_of(script(tmp_path, body), patience())


def test_before_it_is_given_up_the_wait_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORD_SECONDS", 0.1)  # and twice that, and so on: a slow start leaves time for one of them
    said = list[str]()
    with pytest.raises(TrialFailed):
        answer_of(script(tmp_path, "with trying() as trial:\n    trial.doing('waits')\n    time.sleep(1e9)"), patience(said, stall=4.0))
    assert any("has done nothing for" in line and "given up at 4 s (run.stall_seconds)" in line for line in said), said


def test_a_trial_that_ends_without_an_answer_has_its_status_and_last_words_told(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match=r"ended with status 3\.\nThe last it said:\nhalf way"):
        answer_of(script(tmp_path, "print('half way', file=sys.stderr, flush=True); os._exit(3)"), patience())


def test_an_interrupt_ends_both_at_once(tmp_path: Path) -> None:
    body = f"with trying() as trial:\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    time.sleep(1e9)"
    words = script(tmp_path, body)
    waits = (
        "import sys\nfrom midflight.run.launcher.trial import TrialWait, answer_of\nanswer_of(sys.argv[1:], TrialWait('trying it', 1e6))\n"
    )
    with subprocess.Popen([sys.executable, "-c", waits, *words], stderr=subprocess.PIPE) as command:
        pid = _appears(tmp_path / "pid")
        command.send_signal(signal.SIGINT)
        _, said = command.communicate()
    assert b"KeyboardInterrupt" in said
    _is_gone(pid)


def _is_gone(pid: int) -> None:
    """Waits for it: an interrupt before the process was known to its parent leaves its end to the guard, which takes an instant longer."""
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.02)


def _appears(path: Path) -> int:
    while not (path.is_file() and (text := path.read_text())):
        time.sleep(0.02)
    return int(text)
