"""What a streamed chat passes: modules of `src`, functions, and calls for each token.

    python tools/journey.py [DIR]    of this checkout, or of another:
                                     every module with its calls a token

One request for 32 tokens over a real socket, to the processes of `midflight rollouts`: through the
gateway, over the wire to the process of an embedded engine, back, out as server-sent events, and
into the store (SQLite). Counted are the calls that `sys.setprofile` reports, in all threads of all
processes, from the request until everything is quiet again, where the function's source is under
`src/midflight`. A coroutine or generator that goes on after a wait counts again, as
`sys.setprofile` has it.

What the processes do without a request, such as looking at their engines' health, is measured first
and left out, and so is what only some requests call. A step of the engine takes some milliseconds,
so that every token passes on its own. On a busy machine some pass together, which saves calls:
therefore the request with the most calls counts, the first one aside.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

NUM_TOKENS = 32
NUM_REQUESTS = 6
IDLE_SECONDS = 2.5
"""For everything that happens now and then to happen twice."""
QUIET_SECONDS = 0.02
QUIET_CALLS = 8
QUIET_TIMES = 5
"""So often in a row there were no more calls in so many seconds: the journey has ended, only
watches are left.
"""
STALL_SECONDS = 120.0
"""A process that starts and does nothing for so long will not come up. One that is slow is waited
for.
"""
SOURCES = "MIDFLIGHT_JOURNEY_SOURCES"
SOCKET = "MIDFLIGHT_JOURNEY_SOCKET"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 8192,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_context": 256,
}
CONFIG = f"""
[run]
name = "journey"
[environment]
entry = "midflight.environments.claimed:claimed"
max_tokens = {NUM_TOKENS}
[[environment.sources]]
dataset = "spell_backward"
size = 64
heldout = 0
prompt = "reverse {{word}}"
content = "word"
only = "[a-z]+"
[rollout]
groups_per_step = 1
group_size = {NUM_REQUESTS}
"""


Calls = Counter[tuple[str, int, str]]
"""By function: its file, first line and name."""


@dataclass(frozen=True)
class Journey:
    calls: Calls

    @property
    def modules(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (file, _, _), number in self.calls.items():
            found[file] += number
        return found

    @property
    def calls_per_token(self) -> float:
        return self.calls.total() / NUM_TOKENS


def measure(root: Path) -> Journey:
    """Waits for three processes to start, and for the requests: fifteen seconds. Ended by one that
    stands still, or a request's time-out.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        counters = stack.enter_context(Counters.listening(folder / "counters"))
        endpoint = stack.enter_context(_running(root, folder))
        counters.start()
        time.sleep(IDLE_SECONDS)
        idle = counters.stop()
        requests = [_request(endpoint, counters) for _ in range(NUM_REQUESTS)][1:]
    journeys = [
        Counter({function: n for function, n in calls.items() if n > 2 * idle[function]})
        for calls in requests
    ]
    always = set.intersection(*map(set, journeys))
    return Journey(
        max(
            (Counter({f: n for f, n in calls.items() if f in always}) for calls in journeys),
            key=Counter.total,
        )
    )


# --- The processes --------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(root: Path, folder: Path) -> Generator[dict[str, str]]:
    """`midflight rollouts` on a new model, each of its processes with a counter; yields what
    `endpoint.json` says.
    """
    (folder / "journey.toml").write_text(CONFIG)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport "
        "journey\njourney.count()\n"
    )
    plain = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    counted = {
        **plain,
        "PYTHONPATH": f"{folder}:{root / 'src'}",
        SOURCES: str(root / "src" / "midflight"),
        SOCKET: str(folder / "counters"),
    }
    command = [sys.executable, "-m", "midflight"]
    sizes = [word for size, value in SIZES.items() for word in ("--set", f"model.{size}={value}")]
    subprocess.run(
        [*command, "new-model", "model", *sizes],
        cwd=folder,
        env=plain,
        check=True,
        capture_output=True,
    )
    rollouts = [
        *command,
        "rollouts",
        "journey.toml",
        "--folder",
        "run",
        "--set",
        "model.path=model",
    ]
    with (
        (folder / "said").open("wb") as said,
        subprocess.Popen(rollouts, cwd=folder, env=counted, stdout=said, stderr=said) as process,
    ):
        try:
            yield _endpoint(process, folder)
        except BaseException:
            sys.stderr.write((folder / "said").read_text())
            raise
        finally:
            process.terminate()


def _endpoint(process: subprocess.Popen[bytes], folder: Path) -> dict[str, str]:
    """Waits until agents may come, as long as the processes move."""
    from midflight.observe.activity import ProcessActivity  # not where calls are counted

    motion = ProcessActivity(process.pid)
    while "ready: " not in (said := (folder / "said").read_text()):
        if process.poll() is not None or motion.look(said) > STALL_SECONDS:
            raise RuntimeError("midflight rollouts did not start; what it said is above")
        time.sleep(0.2)
    return json.loads((folder / "run" / "endpoint.json").read_text())


# --- A request ------------------------------------------------------------------------------------


def _request(endpoint: dict[str, str], counters: Counters) -> Calls:
    """The chat of a claimed rollout. Claiming it is not counted."""
    address = urlsplit(endpoint["url"]).netloc
    (claim,) = json.loads(
        _post(
            address,
            "/midflight/v1/claims",
            {"max": 1, "wait_seconds": 60},
            endpoint["control_token"],
        )
    )
    counters.quiet()
    chat = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    counters.start()
    events = _post(
        address, urlsplit(claim["base_url"]).path + "/chat/completions", chat, claim["api_key"]
    )
    calls = counters.stop()
    assert events.rstrip().endswith(b"data: [DONE]"), events[-500:]
    return calls


def _post(address: str, path: str, body: dict[str, Any], token: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "POST",
            path,
            json.dumps(body),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        answer = connection.getresponse()
        said = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {said.decode()}")
    return said


# --- Counting -------------------------------------------------------------------------------------


class Counters:
    """The counters of all processes, each at the other end of a socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._files: list[Any] = []

    @classmethod
    @contextlib.contextmanager
    def listening(cls, path: Path) -> Generator[Counters]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
            yield cls(listener)

    def start(self) -> None:
        self._ask("start")

    def stop(self) -> Calls:
        """Waits until hardly anything is called any more."""
        self.quiet()
        found: Calls = Counter()
        for calls in self._ask("stop"):
            found.update({(file, line, name): number for file, line, name, number in calls})
        return found

    def quiet(self) -> None:
        """Waits until hardly anything is called, which takes 0.1 s at least."""
        before = 0
        times = 0
        while times < QUIET_TIMES:
            time.sleep(QUIET_SECONDS)
            now = sum(self._ask("total"))
            times = times + 1 if now - before <= QUIET_CALLS else 0
            before = now

    def _ask(self, word: str) -> list[Any]:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                self._files.append(connection.makefile("rw"))
        answers: list[Any] = []
        for file in list(self._files):
            try:
                file.write(word + "\n")
                file.flush()
                answers.append(json.loads(file.readline()))
            except (OSError, ValueError):  # the process has ended
                self._files.remove(file)
        return answers


def count() -> None:
    """Counts in this process from now on, as the script at the other end of the socket asks."""
    sources = os.environ[SOURCES]
    calls = Counter[Any]()
    on = False

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if on and event == "call" and frame.f_code.co_filename.startswith(sources):
            calls[frame.f_code] += 1

    def answer(asked: str) -> object:
        nonlocal on
        if asked == "start":
            calls.clear()
        elif asked == "stop":
            on = False
            return [
                (c.co_filename.removeprefix(sources + "/"), c.co_firstlineno, c.co_qualname, n)
                for c, n in list(calls.items())
            ]
        on = True
        return calls.total()

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[SOCKET])
            with connection.makefile("rw") as file:
                for line in file:
                    file.write(json.dumps(answer(line.strip())) + "\n")
                    file.flush()

    threading.Thread(target=serve, daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)


if __name__ == "__main__":
    found = measure(Path(sys.argv[1]).resolve() if sys.argv[1:] else Path(__file__).parents[1])
    for file, number in found.modules.most_common():
        sys.stdout.write(f"{number / NUM_TOKENS:8.1f} {file}\n")
    sys.stdout.write(
        f"{len(found.modules)} modules, {len(found.calls)} functions, {found.calls_per_token:.0f} "
        "calls a token\n"
    )
