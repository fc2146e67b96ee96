"""Programs run in boxes of docker, E2B, Daytona and Modal by their own clients, against a stand-in of each one's API: what a sandbox on this
machine says of a program, a box elsewhere says too, no box is left, and what is no fault of a program is never its result."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modal.client
import pytest

from midflight.adapters import harbor
from midflight.config.agents import SandboxSection
from midflight.config.sections import EnvironmentSection
from midflight.environments.reward_functions import Dialogue, Rewards
from midflight.environments.sandboxes import remote
from midflight.environments.sandboxes.choice import sandbox_of
from midflight.environments.sandboxes.port import BoxSetup, ProgramResult, Sandbox
from midflight.errors import Blame, ConfigError, Cost, SandboxLost, SandboxUnavailable
from midflight.types import Task

from .apis import DaytonaApi, DockerEngine, E2bApi
from .machines import Makers
from .modal_api import ModalApi

KINDS = {"docker": DockerEngine, "e2b": E2bApi, "daytona": DaytonaApi, "modal": ModalApi}
KEYS = ("DOCKER_HOST", "E2B_API_KEY", "DAYTONA_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")


def pointed(monkeypatch: pytest.MonkeyPatch, kind: str, address: str, key: str = "right") -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    of_kind = {
        "docker": {"DOCKER_HOST": f"tcp://{address}"},
        "e2b": {
            "E2B_API_KEY": key,
            "E2B_API_URL": f"http://{address}",
            "E2B_SANDBOX_URL": f"http://{address}",
            "E2B_HTTP_VERSION": "1.1",
        },
        "daytona": {"DAYTONA_API_KEY": key, "DAYTONA_API_URL": f"http://{address}/api"},
        "modal": {"MODAL_TOKEN_ID": key, "MODAL_TOKEN_SECRET": key, "MODAL_SERVER_URL": f"http://{address}"},
    }
    for name, value in of_kind[kind].items():
        monkeypatch.setenv(name, value)
    modal.client._Client._set_env_client(None)  # that of a process is kept, whatever becomes of the variables


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def makers(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Makers]:
    with KINDS[kind]() as api:
        pointed(monkeypatch, kind, api.address)
        yield api
        assert not api.boxes, "a box was left"


def made(kind: str, **options: Any) -> Sandbox:
    return sandbox_of(SandboxSection.model_validate({"kind": kind, "seconds": 20.0, "disk_mb": 4, **options}))


def ran(sandbox: Sandbox, code: str, **given: Any) -> ProgramResult:
    return asyncio.run(sandbox.python(code, **given))


def test_a_program_reads_its_files_and_its_input_and_says_what_it_finds(kind: str, makers: Makers) -> None:
    code = "import sys; print(open('data/in.txt').read() + sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(3)"
    found = ran(made(kind), code, files={"data/in.txt": "a" * 1_500_000}, stdin="b'\"$")
    assert (found.status, found.stdout, found.stderr, found.ended_by) == (None, "a" * 1_000_000, "oh\n", "output")
    found = ran(made(kind), code, files={"data/in.txt": "é" * 3}, stdin="b'\"$")
    assert (found.status, found.stdout, found.stderr, found.ended_by, found.ok) == (3, "éééb'\"$\n", "oh\n", None, False)


def test_limits_end_programs_as_they_do_here(kind: str, makers: Makers) -> None:
    found = asyncio.run(made(kind, seconds=2.0).run(["sh", "-c", "echo 1; sleep 60"]))
    assert (found.status, found.stdout, found.ended_by) == (None, "1\n", "time")
    sandbox = made(kind, memory_mb=256)
    found = ran(sandbox, "x = bytearray(10**9)")
    assert found.status == 1 and "MemoryError" in found.stderr
    assert ran(sandbox, "while True: print('x' * 1000)").ended_by == "output"
    assert ran(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").status == -11
    assert ran(sandbox, "open('x', 'wb').write(b'0' * 10**7)").status == 1


def test_what_holds_up_its_own_limit_is_ended_by_time_while_the_maker_answers(
    kind: str, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = made(kind, seconds=1.0)
    monkeypatch.setattr(remote, "HELD_SHARE", 1.0 / 300.0)
    stops = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(9)"
    assert ran(sandbox, stops).ended_by == "time"


def test_no_variable_of_ours_or_of_its_maker_reaches_a_program(kind: str, makers: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_CONTROL_TOKEN", "secret")
    found = ran(made(kind), "import os; print(sorted(os.environ))")
    assert found.ok and not any(name.split("_")[0] in found.stdout for name in ("MIDFLIGHT_", *makers.env)), found


def test_each_program_has_a_box_of_its_own_and_a_box_keeps_what_is_left_in_it(kind: str, makers: Makers) -> None:
    sandbox: Any = made(kind)
    assert ran(sandbox, "open('x', 'w')").ok and "FileNotFound" in ran(sandbox, "open('x')").stderr

    async def both() -> list[ProgramResult]:
        async with sandbox.opened(BoxSetup(folders=["/app"], start="/app", files={"/app/in": "4"})) as box:
            return [await box.run(["sh", "-c", "cat in >out; pwd"]), await box.run(["cat", "out", "/app/more"], files={"/app/more": "2"})]

    assert [found.stdout for found in asyncio.run(both())] == ["/app\n", "42"]


def test_what_is_asked_of_the_maker_bounds_the_box(kind: str, makers: Makers) -> None:
    assert ran(made(kind, memory_mb=512), "").ok
    asked = makers.made[-1].asked
    life = 20 + 2 * 300
    if kind == "docker":
        host = asked["HostConfig"]
        assert (asked["User"], asked["Cmd"], host["NetworkMode"], host["ReadonlyRootfs"]) == (
            "65534:65534",
            ["sleep", str(life)],
            "none",
            True,
        )
        assert (host["Memory"], host["NanoCpus"], host["CapDrop"], host["AutoRemove"]) == (512 * 2**20, 10**9, ["ALL"], True)
        assert host["PidsLimit"] == 40 and "no-new-privileges" in host["SecurityOpt"] and not asked.get("Env")
    elif kind == "e2b":
        assert (asked["timeout"], asked["allow_internet_access"], asked["templateID"]) == (life, False, "base")
    elif kind == "daytona":
        assert (asked["autoStopInterval"], asked["autoDeleteInterval"], asked["networkBlockAll"]) == (-(-life // 60), 0, True)
        assert (asked["cpu"], asked["memory"], asked["disk"]) == (1, 1, 1) and "python:3.12-slim" in asked["buildInfo"]["dockerfileContent"]
    else:
        assert asked.timeout_secs == life and asked.network_access.network_access_type == asked.network_access.BLOCKED
        assert (asked.resources.milli_cpu, asked.resources.memory_mb, asked.resources.memory_mb_max) == (1000, 512, 512)


def test_a_cancelled_program_leaves_no_box(kind: str, makers: Makers) -> None:
    sandbox = made(kind)

    async def cancelled() -> None:
        running = asyncio.create_task(sandbox.run(["sleep", "4"]))
        while not makers.boxes:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(cancelled())


# --- What is no fault of the program ----------------------------------------------------------------------------------


def test_a_maker_that_is_down_is_said_before_a_run_and_fails_rollouts_in_one(kind: str, makers: Makers) -> None:
    sandbox = made(kind)
    makers.is_down = True
    with pytest.raises(SandboxLost, match=rf"making a box of {kind} failed: .*no capacity") as lost:
        ran(sandbox, "")
    assert (lost.value.cost, lost.value.blame) == (Cost.ROLLOUT, Blame.INFRASTRUCTURE)
    with pytest.raises(SandboxUnavailable, match=rf"no capacity.*environment.sandbox.kind = '{kind}': (see|start)"):
        made(kind)


def test_a_box_that_is_gone_is_no_result(kind: str, makers: Makers) -> None:
    sandbox: Any = made(kind)

    async def lost() -> None:
        async with sandbox.opened(BoxSetup()) as box:
            makers.close()
            await box.run(["true"])

    with pytest.raises(SandboxLost, match="in a box failed"):
        asyncio.run(lost())


@pytest.mark.parametrize(("kind", "key"), [("e2b", "E2B_API_KEY"), ("daytona", "DAYTONA_API_KEY"), ("modal", "MODAL_TOKEN_ID")])
def test_a_key_that_is_missing_is_named_and_one_that_is_wrong_refused(
    kind: str, key: str, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(key)
    with pytest.raises(SandboxUnavailable, match=f"needs the variable {key}, which is not set"):
        made(kind)
    pointed(monkeypatch, kind, makers.address, key="wrong")
    with pytest.raises(SandboxUnavailable, match=rf"see the (key|token) in {key}"):
        made(kind)


def test_a_missing_package_names_its_extra(kind: str, makers: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=rf"package {kind}; install it with: pip install 'midflight\[{kind}\]'"):
        made(kind)


def test_docker_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailable, match=r"start Docker, or say in DOCKER_HOST where it is"):
        made("docker")


# --- What they are for ------------------------------------------------------------------------------------------------


def test_a_reward_function_runs_code_in_a_box_elsewhere(kind: str, makers: Makers) -> None:
    section = EnvironmentSection.model_validate({"rewards": [{"entry": "tests.environments.some_tools:passes"}], "sandbox": {"kind": kind}})
    rewards = Rewards(section.rewards, section.sandbox)
    task = Task("0", "code", {"question": "def double(x): ", "tests": "assert double(4) == 8"})

    async def scores() -> list[Any]:
        said = [{"role": "user", "content": "?"}]
        answers = [[*said, {"role": "assistant", "content": f"def double(x): return {what}"}] for what in ("2 * x", "x")]
        return [await rewards.score(Dialogue(task, messages, 1)) for messages in answers]

    assert asyncio.run(scores()) == [{"passes": 1.0}, {"passes": 0.0}]


def test_a_task_of_harbor_whose_image_has_to_be_built_is_played_in_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "task"
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "instruction.md").write_text("Write 42.")
    (task / "task.toml").write_text("[environment]\nmemory_mb = 1024\n")
    (task / "environment" / "Dockerfile").write_text("FROM ubuntu:24.04\nRUN apt-get update\n")
    (task / "tests" / "test.sh").write_text("grep -q 42 /app/answer && echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "docker_agent.py").write_text("async def work(task, client, box):\n    await box.run(['tee', '/app/answer'], stdin='42')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with DockerEngine() as engine:
        pointed(monkeypatch, "docker", engine.address)
        (row,) = harbor.tasks(str(task.parent), agent="docker_agent:work", sandbox={"kind": "docker"})
        assert asyncio.run(harbor.play(Task("0", "harbor", row), None)).reward == 1.0
        with tarfile.open(fileobj=io.BytesIO(engine.built[0])) as context:
            assert "Dockerfile" in {name.removeprefix("./") for name in context.getnames()}
        asked = engine.made[-1].asked
        assert asked["Image"] == "b" * 12 and "User" not in {name for name, value in asked.items() if value}
        assert asked["HostConfig"]["Memory"] == 1024 * 2**20
        assert not engine.boxes
