"""A trial: a process that tries something for a command. The command waits for it as long as it
moves.

The process writes lines of JSON to its standard output: a text for each action that it begins, and
at last its answer. A trial that stands still for `stall_seconds` is ended, and its last action and
its stack are shown. Nothing else limits it: on a slow or busy machine it may take long, and the
wait says so. Importing this needs no torch.
"""

import faulthandler
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from midflight.config.sections import RunSection
from midflight.errors import ConfigError
from midflight.observe.activity import ProcessActivity
from midflight.observe.readable import duration
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.orphan_guard import guarded
from midflight.run.places.port import STACKS_SIGNAL
from midflight.run.places.process import without_access

LOOK_SECONDS = 1.0
"""The seconds between two looks at the process."""
WORD_SECONDS = 10.0
"""The seconds of a wait after which the user is told, then after twice the time, and so on."""
STACK_LOOKS = 3
"""The number of looks within which a process must write its stack. A stopped process writes
none.
"""
FRAMES = 4
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
OF_OTHERS = tuple(f'File "{place}' for place in ("<", *_LIBRARIES))
"""Frames that begin so belong to libraries. The user's own frames, which called them, say more."""
LAST_LINES = 5
STALL_SECONDS = RunSection().stall_seconds
"""The seconds after which a trial counts as hung where there is no configuration."""


class TrialFailed(Exception):
    """A trial that gave no answer. The text names the trial and then the reason."""


def to_terminal(text: str) -> None:
    """Prints the text on standard error, because standard output is a command's result."""
    sys.stderr.write(f"midflight: {text}\n")
    sys.stderr.flush()


# --- The command that waits -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialWait:
    """A command's wait for a trial. `what` names the trial's work, as a participle: `trying the
    configuration`.
    """

    what: str
    stall_seconds: float
    say: Callable[[str], None] = to_terminal


def answer_of(
    command: Sequence[str],
    patience: TrialWait,
    *,
    given: bytes = b"",
    environ: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> bytes:
    """The answer of a trial, as JSON. Raises `TrialFailed` if it stands still, or ends with another
    status than 0.

    Waits for the process as long as that moves. An interrupt ends both at once. `meanwhile` is done
    first, beside it.
    """
    pipe = subprocess.PIPE
    # not a pipe, which a thread would have to fill during the wait for the process
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        with subprocess.Popen(
            guarded(command),
            stdin=file,
            stdout=pipe,
            stderr=pipe,
            env=without_access(os.environ if environ is None else environ),
            start_new_session=True,
        ) as process:
            try:
                meanwhile()
                out, errors = _followed(process, patience)
            finally:
                process.kill()  # a process that has ended by itself keeps its status
    if process.returncode != 0:
        raise TrialFailed(f"ended with status {process.returncode}.{_end(errors)}")
    return (out.splitlines() or [b""])[-1]


def module_answer(
    module: str,
    patience: TrialWait,
    *words: str,
    environ: Mapping[str, str] | None = None,
    given: bytes = b"",
    meanwhile: Callable[[], None] = lambda: None,
) -> bytes:
    """The answer of a module of the launcher. It gets this environment with `environ`, and neither
    the control token nor a way to fetch models. Raises `ConfigError` if it gives no answer.
    """
    command = [sys.executable, "-m", f"midflight.run.launcher.{module}", *words]
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    whole = {**os.environ, **fixed, **(environ or {})}
    whole.pop(TOKEN_VARIABLE, None)
    try:
        return answer_of(command, patience, given=given, environ=whole, meanwhile=meanwhile)
    except TrialFailed as failed:
        raise ConfigError(f"{patience.what} {failed}") from failed


def _followed(process: subprocess.Popen[bytes], patience: TrialWait) -> tuple[bytes, bytes]:
    """Waits for the end of the process, and looks at it now and then."""
    motion = ProcessActivity(process.pid)
    said_at = WORD_SECONDS
    while True:
        try:
            return process.communicate(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired as late:
            out = late.output or b""
            errors = late.stderr or b""
        doing = _doing(out)
        still = motion.look(doing)
        if still >= patience.stall_seconds:
            raise TrialFailed(_hung(process, patience, doing=doing, still=still, errors=errors))
        if motion.seconds >= said_at:
            said_at *= 2
            patience.say(_word(patience, motion, doing=doing, still=still))


def _doing(out: bytes) -> str:
    """Returns the last whole line with the process's present action, or an empty string before the
    first.
    """
    lines = out.split(b"\n")[:-1]
    try:
        return msgspec.json.decode(lines[-1], type=str) if lines else ""
    except msgspec.DecodeError:  # it is the answer
        return ""


def _word(patience: TrialWait, motion: ProcessActivity, *, doing: str, still: float) -> str:
    does = motion.what
    if still > 2 * LOOK_SECONDS:
        does = (
            f"has done nothing for {still:.0f} s; it is given up at {patience.stall_seconds:g} s "
            "(run.stall_seconds)"
        )
    what = f"{patience.what}: {doing}" if doing else patience.what
    return f"{what}, for {duration(motion.seconds)}, {does}"


def _hung(
    process: subprocess.Popen[bytes],
    patience: TrialWait,
    *,
    doing: str,
    still: float,
    errors: bytes,
) -> str:
    during = f" while it {doing}" if doing else ""
    what = (
        f"did nothing for {still:.0f} s{during}: it took no processor time, read and wrote nothing"
    )
    remedy = "Mend what it waits for, or raise run.stall_seconds."
    return f"{what}. {remedy}{_stack(process, before=len(errors))}{_end(errors)}"


def _stack(process: subprocess.Popen[bytes], *, before: int) -> str:
    """The stack of the process, which it writes itself. Waits for that, some looks at most."""
    process.send_signal(STACKS_SIGNAL)
    said = b""
    for _ in range(STACK_LOOKS):
        try:
            said = process.communicate(timeout=LOOK_SECONDS)[1][before:]
            break
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"")[before:]
        if b"File" in said:
            break
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    own = [line for line in frames if not line.startswith(OF_OTHERS)] or frames
    return _paragraph("It stands at:", own[:FRAMES])


def _end(said: bytes) -> str:
    return _paragraph("The last it said:", said.decode(errors="replace").splitlines()[-LAST_LINES:])


def _paragraph(head: str, lines: Sequence[str]) -> str:
    """Returns the lines below a head, or an empty text if there are none. Begins a new line."""
    if not lines:
        return ""
    return "".join(f"\n{line}" for line in [head, *lines])


# --- The process that tries -----------------------------------------------------------------------


class TrialReport:
    """Writes the process's actions, and its answer. It does not wait until they are read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def doing(self, what: str) -> None:
        """Reports the next action, as a verb with its object: `imports 'my_env:solve'`."""
        self.answer(msgspec.json.encode(what))

    def answer(self, line: bytes) -> None:
        """Writes a line. The last line is the answer."""
        rest = line + b"\n"
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


@contextmanager
def trying() -> Generator[TrialReport]:
    """Surrounds all the work of the process. Output that other code prints meanwhile goes to
    standard error, so that it is not mistaken for the answer.
    """
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield TrialReport(own)
    finally:
        sys.stdout.flush()
        os.close(own)
