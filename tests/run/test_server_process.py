"""Servers of other people as children: started, awaited, lost, and never left behind. The server is a fake, all processes are real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.real.processes import Command, alive, free_port, gone

from midflight.config.sections import Config
from midflight.errors import ConfigError, RunFailed
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.engine import companion, server_process
from midflight.run.engine.server_process import attached, check_interpreter, reserve_port, started
from midflight.run.heartbeat import Heartbeat
from midflight.run.launcher.child import failure_of
from midflight.run.parts import EngineSpec, ServerLost, Verdict
from midflight.run.places.port import PartFailed, error_of
from midflight.run.scratch import segment_name
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.weights.transports.memory_files import SHARED

pytestmark = pytest.mark.timeout(150)
SIZES = {"vocab_size": 262, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """All of a model but its weights, which nobody here reads."""
    folder = tmp_path / "model"
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment in which every module is the fake."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).with_name("fake_vllm.py")} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def config(tmp_path: Path, python: Path) -> Callable[..., Config]:
    def make(*arguments: str, seconds: float = 20) -> Config:
        engine = {"kind": "vllm", "python": python, "arguments": arguments, "start_seconds": seconds}
        return Config.model_validate({"engine": engine, "run": {"folder": tmp_path / "run"}})

    return make


def log(tmp_path: Path) -> str:
    return (tmp_path / "run" / "logs" / "engine0.server.log").read_text()


def told(tmp_path: Path, word: str) -> list[int]:
    """The numbers that the fake has said of itself, the oldest first."""
    return [int(pid) for pid in re.findall(rf"^{word}: (\d+)$", log(tmp_path), re.M)]


def test_versions_are_staged_in_memory_of_the_engines_own_machine_and_leave_with_it(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier life that was killed has left there goes first: nobody holds it any more."""
    left = SHARED / f"{segment_name(tmp_path)}-engine0-killed.scratch"
    left.mkdir()
    seen: list[Path] = []

    async def speak(*_: object, staging: Path, **__: object) -> None:
        assert staging.is_dir() and not left.exists()
        seen.append(staging)

    monkeypatch.setattr(companion, "speak_for_server", speak)

    async def main() -> None:
        descriptor = socket.create_server(("127.0.0.1", 0)).detach()
        spec = EngineSpec("engine0", "model", config().model_dump_json(), descriptor, "token", segment_name(tmp_path))
        await companion.run_companion(spec, SimpleNamespace(heartbeat=Heartbeat()))

    asyncio.run(main())
    (staging,) = seen
    assert staging.parent == SHARED and staging.name.startswith(f"{segment_name(tmp_path)}-engine0-") and not staging.exists()


def test_a_server_answers_when_it_has_started_and_is_gone_with_its_children_after(
    config: Callable[..., Config], model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with started(config("--child"), model, name="engine0", version=0) as server:
            with urllib.request.urlopen(f"{server.url}/version") as answer:
                assert json.load(answer) == {"version": "0.32.0"}

    asyncio.run(main())
    assert gone([*told(tmp_path, "process"), *told(tmp_path, "child")], seconds=2)


def test_a_server_that_ignores_the_request_to_end_is_killed(
    config: Callable[..., Config], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.2)

    async def main() -> None:
        async with started(config("--stubborn"), model, name="engine0", version=0):
            pass

    asyncio.run(main())
    assert gone(told(tmp_path, "process"), seconds=2)


def test_nothing_of_ours_is_in_the_servers_environment(
    config: Callable[..., Config], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        TOKEN_VARIABLE: "secret-secret-secret",
        "VIRTUAL_ENV": "/ours",
        "PYTHONPATH": "/ours/lib",
        "PATH": f"/ours/bin:{os.environ['PATH']}",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        async with started(config(), model, name="engine0", version=0):
            pass

    asyncio.run(main())
    environ = json.loads(log(tmp_path).splitlines()[0].removeprefix("environment: "))
    assert not {TOKEN_VARIABLE, "VIRTUAL_ENV"} & environ.keys()
    assert "/ours" not in json.dumps(environ)
    assert environ["PYTHONPATH"].endswith("engines/servers/inside")


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(config: Callable[..., Config], model: Path) -> None:
    async def main() -> None:
        async with started(config("--fail"), model, name="engine0", version=0):
            raise AssertionError("it came up")

    with pytest.raises(
        RunFailed, match=r"starting engine0's server: .* exit status 1; the end of .*engine0\.server\.log:(?s:.*)the fake has no model"
    ):
        asyncio.run(main())


def test_a_server_that_loads_for_three_times_the_bound_comes_up(config: Callable[..., Config], model: Path) -> None:
    async def main() -> None:
        async with started(config("--load=3", seconds=1), model, name="engine0", version=0):
            pass

    asyncio.run(main())


def test_a_server_that_never_answers_and_does_nothing_is_an_error_and_is_ended(
    config: Callable[..., Config], model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with started(config("--hang", seconds=1), model, name="engine0", version=0):
            raise AssertionError("it came up")

    began = time.monotonic()
    with pytest.raises(
        ServerLost, match=r"no answer from http://127\.0\.0\.1:\d+/health, and it took no processor .* 1 s; raise engine\.start_seconds"
    ):
        asyncio.run(main())
    assert time.monotonic() - began < 4
    assert gone(told(tmp_path, "process"), seconds=2)


def test_a_server_that_is_killed_while_it_starts_is_lost_and_not_to_blame(
    config: Callable[..., Config], model: Path, tmp_path: Path
) -> None:
    async def kill() -> None:
        log = tmp_path / "run" / "logs" / "engine0.server.log"
        while not (log.exists() and told(tmp_path, "process")):
            await asyncio.sleep(0.01)
        os.kill(told(tmp_path, "process")[0], signal.SIGKILL)

    async def main() -> None:
        killing = asyncio.create_task(kill())
        async with started(config("--hang"), model, name="engine0", version=0):
            raise AssertionError("it came up")
        await killing

    with pytest.raises(ServerLost, match="engine0's server ended with signal SIGKILL") as caught:
        asyncio.run(main())
    assert failure_of(caught.value).verdict is Verdict.KILLED
    failure = error_of("engine0", failure_of(caught.value))
    assert isinstance(failure, PartFailed) and failure.was_killed


def test_the_death_of_a_server_that_has_served_is_told_with_the_log_of_this_start_only(config: Callable[..., Config], model: Path) -> None:
    async def main() -> None:
        async with started(config(), model, name="engine0", version=0) as server:
            with pytest.raises(OSError):
                urllib.request.urlopen(f"{server.url}/die")
            await server.died()

    for _ in range(2):
        with pytest.raises(ServerLost, match=r"exit status 3; the end of (?s:.*)the fake was told to die") as caught:
            asyncio.run(main())
        assert str(caught.value).count("told to die") == 1


def test_a_server_dies_with_the_process_that_started_it_however_that_dies(
    config: Callable[..., Config], model: Path, tmp_path: Path
) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from midflight.config.sections import Config\n"
        "from midflight.run.engine.server_process import started\n"
        "async def main():\n"
        "    async with started(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]), name='engine0', version=0):\n"
        "        print('up', flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", program, config("--child").model_dump_json(), str(model)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as companion:
        assert companion.stdout is not None and companion.stdout.readline() == "up\n"
        server = [*told(tmp_path, "process"), *told(tmp_path, "child")]
        assert len(server) == 2 and all(map(alive, server))
        companion.send_signal(signal.SIGKILL)
    assert gone(server, seconds=4)


def test_a_reserved_port_is_given_to_nobody_by_chance_and_to_the_server_that_asks_for_it() -> None:
    with reserve_port() as reserved, socket.socket() as stranger, socket.socket() as server:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match=r"in use"):
            stranger.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


def test_a_server_that_others_started_is_waited_for_and_not_ended(config: Callable[..., Config], python: Path, model: Path) -> None:
    port = free_port()
    engine = config(seconds=0.4).engine

    async def main() -> None:
        async with attached(engine, f"http://127.0.0.1:{port}/", name="engine0") as server:
            assert server.url == f"http://127.0.0.1:{port}"

    with pytest.raises(RunFailed, match=rf"no vllm server answered at http://127\.0\.0\.1:{port}/health within 0\.4 s"):
        asyncio.run(main())
    engine = config(seconds=20).engine
    with subprocess.Popen([python, "--port", str(port), "--model", model], stdout=subprocess.DEVNULL) as theirs:
        asyncio.run(main())
        assert theirs.poll() is None
        theirs.terminate()


def test_a_missing_interpreter_is_named_with_what_installs_it(config: Callable[..., Config]) -> None:
    engine = config().engine
    check_interpreter(engine)
    with pytest.raises(ConfigError, match=r"no interpreter /absent/python; run `make engines`"):
        check_interpreter(engine.model_copy(update={"python": Path("/absent/python")}))
    check_interpreter(engine.model_copy(update={"python": Path("/absent/python"), "urls": ("http://127.0.0.1:1",)}))
    check_interpreter(Config().engine)


def test_serve_starts_a_server_again_that_died_and_leaves_nothing_behind(python: Path, model: Path, tmp_path: Path) -> None:
    words = ["--set", f"engine.python={python}", "--set", f"run.folder={tmp_path / 'run'}", "--port", 0]
    command = Command("serve", "--model", model, "--engine", "vllm", *words, folder=tmp_path)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        (first,) = told(tmp_path, "process")
        os.kill(first, signal.SIGKILL)
        command.until(lambda: len(told(tmp_path, "process")) == 2, "second server")
        assert "engine0's server ended with signal SIGKILL" in command.said
        assert "engine0 is started again; 1 restarts are left." in command.said
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(20) == 143
        assert gone(told(tmp_path, "process"), seconds=2)
    finally:
        command.end()


def test_a_server_that_runs_already_is_spoken_for_and_its_death_is_said(python: Path, model: Path, tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen([python, "--port", str(port), "--model", model], stdout=subprocess.DEVNULL) as theirs:
        words = ["--engine", "vllm", "--engine-url", f"http://127.0.0.1:{port}", "--port", 0]
        command = Command("engine", "--model", model, *words, folder=tmp_path)
        try:
            command.until(lambda: "ready: " in command.said, "announcement of the address")
            (url,) = re.findall(r"ready: (\S+)", command.said)
            with urllib.request.urlopen(f"{url}/model_info") as answer:
                assert json.load(answer)["capabilities"]["max_context"] == 256
            assert theirs.poll() is None
            theirs.kill()
            command.until(lambda: "alarm: engine gets no more requests: " in command.said, "word of its death")
            command.process.send_signal(signal.SIGTERM)
            assert command.wait(20) == 143
        finally:
            command.end()
            theirs.terminate()
