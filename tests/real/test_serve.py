"""`midflight serve` with two engines, the unmodified `openai` SDK, and plain HTTP. One server for all; the last test ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from .processes import Command, free_port, gone, segments

LONG = {"ignore_eos": True}
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_openai.py"


class Served:
    def __init__(self, command: Command, url: str, token: str, folder: Path) -> None:
        self.command, self.url, self.token, self.folder = command, url, token, folder

    def metric(self, text: str, name: str) -> float:
        """Sum over its labels."""
        return sum(float(value) for value in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    sizes = [
        x
        for size in ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")
        for x in ("--set", f"model.{size}")
    ]
    made = Command("new-model", folder / "model", *sizes, "--set", "model.max_context=2048", folder=folder)
    assert made.wait() == 0, made.said
    port = free_port()
    command = Command("serve", "--model", folder / "model", "--engines", 2, "--port", port, folder=folder)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        command.until(lambda: "control token: " in command.said, "announcement of the token")
        said = re.fullmatch(
            rf"serving .* with 2 embedded engines on cpu; logs: runs/serve-{port}/logs\nready: http://127.0.0.1:{port}/v1\ncontrol token: (\S+)",
            command.said.strip(),
        )
        assert said is not None, command.said
        yield Served(command, f"http://127.0.0.1:{port}", said[1], folder)
    finally:
        command.end()


@contextlib.asynccontextmanager
async def http(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {served.token}"}
    async with aiohttp.ClientSession(served.url, headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def streamed(client: openai.AsyncOpenAI, prompt: str, *, seed: int, max_tokens: int, seen: list[str] | None = None) -> str:
    pieces: list[str] = [] if seen is None else seen
    stream = await client.completions.create(model="policy", prompt=prompt, seed=seed, max_tokens=max_tokens, stream=True, extra_body=LONG)
    reason = None
    async for chunk in stream:
        pieces.append(chunk.choices[0].text)
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "length"
    return "".join(pieces)


async def whole(client: openai.AsyncOpenAI, prompt: str, *, seed: int, max_tokens: int) -> str:
    answer = await client.completions.create(model="policy", prompt=prompt, seed=seed, max_tokens=max_tokens, extra_body=LONG)
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
    return answer.choices[0].text


def test_a_server_is_healthy_and_lists_its_model(served: Served) -> None:
    async def main() -> None:
        async with http(served) as session, session.get("/health") as answer:
            assert answer.status == 200
        async with client_of(served) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]

    run(main())


def test_the_sdk_gets_chat_and_completions_streamed_and_whole_alike(served: Served) -> None:
    async def main() -> None:
        async with client_of(served) as client:
            ask: dict[str, Any] = {
                "model": "policy",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 20,
                "n": 2,
                "seed": 5,
            }
            answer = await client.chat.completions.create(**ask)
            texts = ["", ""]
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert [choice.message.content for choice in answer.choices] == texts
            assert texts[0] != texts[1], "choices of one request have seeds of their own"
            assert await whole(client, "abc", seed=1, max_tokens=50) == await streamed(client, "abc", seed=1, max_tokens=50)
            assert await whole(client, "abc", seed=1, max_tokens=50) != await whole(client, "abc", seed=2, max_tokens=50)

    run(main())


def test_the_example_of_an_agent_asks_and_prints_what_it_is_told(served: Served) -> None:
    command = [sys.executable, EXAMPLE, "--base-url", f"{served.url}/v1", "hello", "word"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"{word} -> ") for word in ("hello", "word")] == [1, 1]
    assert done.stdout.count("  wrong, it is ") == 2, "the model is untrained"


def test_a_stop_string_ends_an_answer_before_it(served: Served) -> None:
    async def main() -> None:
        async with client_of(served) as client:
            text = await whole(client, "abc", seed=3, max_tokens=60)
            middle = next(piece for piece in re.findall(r"[ -~]{2}", text))
            answer = await client.completions.create(model="policy", prompt="abc", seed=3, max_tokens=60, stop=middle, extra_body=LONG)
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].text == text[: text.index(middle)]

    run(main())


def test_native_generation_gives_ids_and_versions_and_is_aborted_by_its_id(served: Served) -> None:
    async def main() -> None:
        async with http(served) as session:
            body = {"input_ids": [97, 98], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
            async with session.post("/generate", json=body) as answer:
                assert answer.status == 200 and len((await answer.json())["output_ids"]) == 5
            long = {"text": "x", "rid": "mine", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
            asked = asyncio.create_task(post(session, "/generate", long))
            await asyncio.sleep(0.3)
            _, said = await post(session, "/abort_request", {"rid": "mine"})
            status, aborted = await asked
            assert (said["num_aborted"], status, aborted["meta_info"]["finish_reason"]["type"]) == (1, 200, "abort")
            assert 0 < len(aborted["output_ids"]) < 1900

    run(main())


async def post(session: aiohttp.ClientSession, path: str, body: object) -> tuple[int, Any]:
    async with session.post(path, json=body) as answer:
        return answer.status, await answer.json()


def test_what_controls_needs_the_token_that_was_printed_once(served: Served) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(served.url) as stranger:
            for path in ("/pause_generation", "/continue_generation", "/abort_request", "/midflight/v1/sessions"):
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    async with stranger.post(path, json={}, headers=headers) as answer:
                        assert answer.status == 401, path
            for path in ("/health", "/metrics", "/v1/models"):
                async with stranger.get(path) as answer:
                    assert answer.status == 200, path

    run(main())


def test_a_harness_of_another_language_gets_a_session_and_its_rows(served: Served) -> None:
    async def main() -> None:
        async with http(served) as session:
            status, handle = await post(session, "/midflight/v1/sessions", {"sampling": {"max_tokens": 9}, "task": "any"})
            assert status == 200 and handle["base_url"].startswith(f"{served.url}/s/")
            async with openai.AsyncOpenAI(base_url=handle["base_url"], api_key="none", max_retries=0) as client:
                answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
            place = f"/midflight/v1/sessions/{handle['session_id']}"
            assert (await post(session, f"{place}/reward", {"reward": 1}))[0] == 200
            status, record = await post(session, f"{place}/end", {})
            assert status == 200 and answer.usage is not None
            assert record["num_tokens"] == answer.usage.completion_tokens and record["reward"] == 1

    run(main())


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort", "drain"])
def test_i5_requests_in_flight_and_64_posted_in_a_pause_all_complete_as_if_there_had_been_none(served: Served, mode: str) -> None:
    async def main() -> None:
        async with client_of(served) as client, http(served) as session:
            expected = [await whole(client, f"p{i}", seed=i, max_tokens=300) for i in range(2)]
            seen: list[list[str]] = [[], []]
            flying = [asyncio.create_task(streamed(client, f"p{i}", seed=i, max_tokens=300, seen=seen[i])) for i in range(2)]
            while not all(seen):
                await asyncio.sleep(0.005)
            assert (await post(session, "/pause_generation", {"mode": mode}))[0] == 200
            waiting = [asyncio.create_task(whole(client, f"q{i}", seed=i, max_tokens=8)) for i in range(64)]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in waiting)
            assert all(task.done() for task in flying) == (mode == "drain")
            assert (await post(session, "/continue_generation", {}))[0] == 200
            assert await asyncio.gather(*flying) == expected
            assert len(await asyncio.gather(*waiting)) == 64

    run(main())


@pytest.mark.parametrize("changes", [
    {"model": "other"}, {"temperature": -1}, {"top_p": 2}, {"n": 0}, {"max_tokens": 0}, {"prompt": [1, 70000]},
    {"prompt": [-1]}, {"prompt": "x" * 3000}, {"logit_bias": {"5": 101}}, {"temprature": 1}, {"prompt": []}, {"n": 10**9}, {"seed": "x"},
    {"stop": [""]}, {"stop_token_ids": [99999]},
], ids=str)  # fmt: skip
def test_a_bad_request_is_refused_with_the_field_in_openais_shape(served: Served, changes: dict[str, Any]) -> None:
    async def main() -> None:
        async with http(served) as session:
            status, body = await post(session, "/v1/completions", {"model": "policy", "prompt": "hi", "max_tokens": 4, **changes})
            assert status == (404 if "model" in changes else 400), body
            assert set(body["error"]) >= {"message", "type", "param", "code"}
            (field,) = changes
            assert field in body["error"]["message"] or body["error"]["param"] == field, body

    run(main())


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"model": "policy", "prompt": "x", "temperature": NaN}', b"\xff\xfe"])
def test_a_body_that_is_no_request_is_refused_and_the_server_goes_on(served: Served, body: bytes) -> None:
    async def main() -> None:
        async with http(served) as session:
            async with session.post("/v1/completions", data=body) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["message"]
            async with session.post("/v1/nothing") as answer:
                assert answer.status == 404 and "error" in await answer.json()
        async with client_of(served) as client:
            await whole(client, "still here", seed=1, max_tokens=3)
            with pytest.raises(openai.NotFoundError, match="other"):
                await client.completions.create(model="other", prompt="x")

    run(main())


def test_i5_i7_an_engine_killed_in_mid_stream_is_not_noticed_and_comes_back(served: Served) -> None:
    """Both engines, one after the other: the second kill shows that the first has rejoined."""

    async def main() -> None:
        async with client_of(served) as client, http(served) as session:

            async def metrics() -> str:
                async with session.get("/metrics") as answer:
                    return await answer.text()

            expected = await asyncio.gather(*(whole(client, f"k{i}", seed=i, max_tokens=400) for i in range(4)))
            resumes = served.metric(await metrics(), "midflight_resumes")
            failed = served.metric(await metrics(), "midflight_failed_requests")
            engines = sorted(served.command.parts()["engine"])
            for pid in engines:
                seen: list[list[str]] = [[] for _ in range(4)]
                flying = [asyncio.create_task(streamed(client, f"k{i}", seed=i, max_tokens=400, seen=seen[i])) for i in range(4)]
                while not all(seen):
                    await asyncio.sleep(0.005)
                os.kill(pid, signal.SIGKILL)
                assert await asyncio.gather(*flying) == expected
                assert served.metric(await metrics(), "midflight_resumes") > resumes
                resumes = served.metric(await metrics(), "midflight_resumes")
                async with asyncio.timeout(45):
                    while served.metric(await metrics(), "midflight_engine_quarantined"):
                        await asyncio.sleep(0.1)
            assert not set(served.command.parts()["engine"]) & set(engines)
            assert served.metric(await metrics(), "midflight_failed_requests") == failed

    run(main())


def test_i9_ctrl_c_ends_everything_within_five_seconds_with_requests_in_flight(served: Served) -> None:
    parts = [pid for found in served.command.parts().values() for pid in found]
    assert len(parts) == 3

    async def main() -> None:
        async with client_of(served) as client:
            seen: list[str] = []
            flying = asyncio.create_task(streamed(client, "z", seed=1, max_tokens=1900, seen=seen))
            while not seen:
                await asyncio.sleep(0.005)
            served.command.process.send_signal(signal.SIGINT)
            with pytest.raises((openai.APIError, AssertionError)):
                await flying

    began = time.monotonic()
    run(main())
    assert served.command.wait(10) == 130
    assert gone(parts, seconds=0.5)
    assert time.monotonic() - began < 5
    assert "Traceback" not in served.command.said
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(served.url.rpartition(":")[2]))) != 0
    assert not segments(served.folder / "runs" / f"serve-{served.url.rpartition(chr(58))[2]}")
