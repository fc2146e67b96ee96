"""Whole runs on real servers: `midflight train` and `midflight serve` start them, and a kill -9 in the middle costs only time."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import openai
import pytest
from tests.real.processes import CONFIG, Command, alive, arguments_of, free_port, journal, pids, segments, status_of, steps
from tests.real_engines.process import Kind, interpreter

pytestmark = pytest.mark.timeout(400)

KINDS: tuple[Kind, ...] = ("vllm", "sglang")
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
NUM_STEPS = 12
SIZES = ("hidden_size=64", "intermediate_size=128", "num_layers=2", "num_heads=2", "num_kv_heads=1", "max_context=256")
"""Heads are as wide as vLLM needs on a CPU."""


def servers_of(command: Command, kind: Kind) -> list[int]:
    """Process ids of the servers that the command started, each below one of its engine processes."""
    ours = set(command.parts().get("engine", ()))
    words = {pid: arguments_of(pid) for pid in pids() if ours & set(ancestors(pid))}
    return sorted(pid for pid, said in words.items() if MODULES[kind] in said)


def ancestors(pid: int) -> Iterator[int]:
    while (parent := int(status_of(pid).get("PPid", "0"))) > 1:
        yield parent
        pid = parent


def kill_server(command: Command, kind: Kind) -> int:
    pid = servers_of(command, kind)[0]
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`midflight VERB` with these options; whatever is left of it is killed after the test."""
    started: list[Command] = []

    def start(*words: object) -> Command:
        started.append(Command(*words, folder=tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.mark.parametrize("kind", KINDS)
def test_i7_i8_a_run_whose_server_is_killed_goes_on_at_its_version_and_loses_no_request(
    kind: Kind, command: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    sizes = [f"model.{size}" for size in SIZES]
    sets = [f"engine.kind={kind}", f"engine.python={interpreter(kind)}", f"run.steps={NUM_STEPS}", "gateway.request_seconds=300"]
    sets += ["environment.rollout_seconds=300", "run.stop_seconds=10"]
    words = [word for each in (*sets, *sizes) for word in ("--set", each)]
    training = command("train", "small.toml", "--folder", "run", *words)
    run = tmp_path / "run"
    training.until(lambda: any(line["step"] >= 3 for line in steps(run)), "step 3", 200)
    killed = kill_server(training, kind)
    assert training.wait(250) == 0, training.said
    assert not alive(killed) and "engine0 is started again" in training.said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["failed_requests"], summary["failed_rollouts"], summary["steps"]) == (0, 0, NUM_STEPS)
    assert summary["max_token_staleness"] <= 4
    assert [line["step"] for line in steps(run)] == list(range(1, NUM_STEPS + 1))
    assert [line["version"] for line in journal(run) if line["kind"] == "evaluation"][-1] == summary["version"]
    assert not servers_of(training, kind) and not segments(run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_takes_turns_with_the_trainer_by_its_own_routes(kind: Kind, command: Callable[..., Command], tmp_path: Path) -> None:
    """On a CPU it keeps its memory: what is tried is that its routes are there, in this order, and that it answers after them."""
    (tmp_path / "small.toml").write_text(CONFIG.replace("max_tokens = 6", "max_tokens = 40"))
    sets = [f"engine.kind={kind}", f"engine.python={interpreter(kind)}", "run.steps=6", "gateway.request_seconds=300", "engine.share=time"]
    sets += ["environment.rollout_seconds=300", "run.stop_seconds=10", *(f"model.{size}" for size in SIZES)]
    training = command("train", "small.toml", "--folder", "run", *(word for each in sets for word in ("--set", each)))
    run = tmp_path / "run"
    assert training.wait(350) == 0, training.said
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["failed_requests"], summary["failed_rollouts"], summary["steps"]) == (0, 0, 6)
    assert summary["rollouts_spanning_versions"] > 0
    assert [line["version"] for line in journal(run) if line["kind"] == "evaluation"][-1] == summary["version"] == 6
    log = (run / "logs" / "engine0.server.log").read_text()
    if kind == "vllm":
        assert log.count("sleep mode is not supported on CPU") >= 6
    assert not servers_of(training, kind) and not segments(run)


def test_f1_an_answer_goes_on_from_its_tokens_on_another_server_and_the_dead_one_comes_back(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    sizes = [word for size in SIZES for word in ("--set", f"model.{size}")]
    made = command("new-model", "model", *sizes)
    assert made.wait() == 0, made.said
    port = free_port()
    words = ["--engine", "vllm", "--engines", 2, "--port", port, "--set", f"engine.python={interpreter('vllm')}"]
    serving = command("serve", "--model", "model", *words, "--set", "gateway.request_seconds=300")
    serving.until(lambda: "ready: " in serving.said, "address", 200)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300) as client:

            async def ask(number: int, seen: list[str]) -> str:
                extra = {"ignore_eos": True}
                stream = await client.completions.create(
                    model="policy", prompt=f"p{number}", temperature=0, max_tokens=200, stream=True, extra_body=extra
                )
                seen += [chunk.choices[0].text async for chunk in stream]
                return "".join(seen)

            expected = await asyncio.gather(*(ask(n, []) for n in range(4)))
            assert [len(e) > 0 for e in expected] == [True] * 4
            for _ in range(2):  # the second kill shows that the first has come back
                flying = [asyncio.create_task(ask(n, [])) for n in range(4)]
                await asyncio.sleep(1.0)
                kill_server(serving, "vllm")
                assert await asyncio.gather(*flying) == expected
                await until_all_back(port)

    asyncio.run(asyncio.wait_for(main(), 380))


async def until_all_back(port: int) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for _ in range(300):
            async with session.get("/metrics") as answer:
                quarantined = re.findall(r"^midflight_engine_quarantined{.*} (\S+)$", await answer.text(), re.M)
            if quarantined and set(quarantined) == {"0.0"}:
                return
            await asyncio.sleep(0.5)
    raise AssertionError("an engine did not come back")
