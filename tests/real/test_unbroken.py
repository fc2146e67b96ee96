"""I5 on real processes: whatever happens to the embedded engines, every dialect gives the undisturbed answer, token for token.

One `midflight serve` with two engines of random, fixed weights in float32. The same requests are asked over and over while an
operator pauses and aborts, and engines are killed, frozen and started again.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest
from tests.gateway.asked import CHAT, Asking, Choice, Told, asked, requests

from .processes import Command, free_port

TOKEN = "only-the-operator-knows-it"
NUM_TOKENS = 250
LONG = {"ignore_eos": True}
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=2048")
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 20}
SCHEMA = {"type": "object", "properties": {"colours": COLOURS}, "required": ["colours"], "additionalProperties": False}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}

Name: TypeAlias = tuple[str, bool]
"""Of a request, and whether it streams."""


class Served:
    def __init__(self, command: Command, url: str, token: str) -> None:
        self.command, self.url, self.token = command, url, token

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=120) as http:
            yield http


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    sizes = [word for size in SIZES for word in ("--set", f"model.{size}")]
    made = Command("new-model", folder / "model", *sizes, folder=folder)
    assert made.wait() == 0, made.said
    port = free_port()
    command = Command(
        "serve",
        "--model",
        folder / "model",
        "--engines",
        2,
        "--port",
        port,
        "--set",
        "run.restarts=9",
        "--control-token",
        TOKEN,
        folder=folder,
    )
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        yield Served(command, f"http://127.0.0.1:{port}", TOKEN)
    finally:
        command.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("unbroken")) as served:
        yield served


def metric(text: str, name: str) -> float:
    """Sum over its labels."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M))


async def metrics(http: httpx2.AsyncClient) -> str:
    return (await http.get("/metrics")).text


def table(stop: str) -> dict[Name, Asking]:
    """All requests, each with and without a stream."""
    chat: dict[str, Any] = {"model": "policy", "messages": CHAT, "seed": 11, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {"101": 4, "98": -100}}
    wanted = {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA, "strict": True}}
    forced = {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
    kinds: dict[str, Asking] = requests(NUM_TOKENS, stop=stop, **LONG) | {
        "penalties": ("/v1/chat/completions", {**chat, **LONG, **penalties, "logprobs": True, "top_logprobs": 3}),
        "a schema": ("/v1/chat/completions", {**chat, "max_tokens": 1000, "response_format": wanted}),
        "a forced call": ("/v1/chat/completions", {**chat, "max_tokens": 600, **forced}),
    }
    return {(name, stream): asking for name, asking in kinds.items() for stream in (False, True)}


async def calm_answers(http: httpx2.AsyncClient, kinds: dict[Name, Asking]) -> dict[Name, Told]:
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(asked(http, "/v1", asking, stream=name[1])) for name, asking in kinds.items()}
    return {name: task.result() for name, task in tasks.items()}


def stop_in(text: str) -> str:
    """Two letters past the middle of a text: a stop string that ends it there, and others perhaps."""
    found = re.search(r"[!-~]{2}", text[len(text) // 2 :])
    assert found is not None, text
    return found[0]


def check_alike(name: Name, told: Told, expected: Told) -> None:
    """Token for token; log-probabilities to rounding, because a resumed prompt is read in one go."""
    assert told.usage == expected.usage and told.choices.keys() == expected.choices.keys(), name
    for index, choice in told.choices.items():
        same = expected.choices[index]
        assert told_of(choice) == told_of(same), name
        assert choice.logprobs == pytest.approx(same.logprobs, abs=1e-4), name


def told_of(choice: Choice) -> tuple[Any, ...]:
    return choice.ids, choice.text, choice.ended, choice.num_alternatives, choice.versions


def is_aborted(told: Told, expected: Told) -> bool:
    """Native requests end with an operator's abort, as their clients want it: with the first tokens of the answer."""
    (choice,) = told.choices.values()
    if choice.ended != "abort":
        return False
    assert choice.ids == expected.choices[0].ids[: len(choice.ids)]
    return True


class Askers:
    """Each kind of request again and again, one after the other, until the disturbances are over; all kinds at once."""

    def __init__(self, http: httpx2.AsyncClient, kinds: dict[Name, Asking], expected: dict[Name, Told]) -> None:
        self._http, self._kinds, self._expected = http, kinds, expected
        self.over = False
        self.num_asked = self.num_resumes = self.num_aborted = 0

    async def run(self, name: Name) -> None:
        while not self.over:
            told = await asked(self._http, "/v1", self._kinds[name], stream=name[1])
            if name[0] == "native" and is_aborted(told, self._expected[name]):
                self.num_aborted += 1
                continue
            check_alike(name, told, self._expected[name])
            self.num_asked += 1
            self.num_resumes += told.num_resumes


class Disturber:
    """What operators and machines do to engines, drawn from a seed."""

    def __init__(self, served: Served, http: httpx2.AsyncClient, *, seed: int) -> None:
        self._served, self._http = served, http
        self._random = random.Random(seed)

    async def run(self, events: list[str]) -> None:
        for event in events:
            await asyncio.sleep(self._random.uniform(0.1, 0.5))
            await self._do(event)

    async def _do(self, event: str) -> None:
        match event:
            case "abort all":
                await self._post("/abort_request", abort_all=True)
            case "kill one":
                os.kill(self._random.choice(self._engines()), signal.SIGKILL)
            case "kill both":
                for pid in self._engines():
                    os.kill(pid, signal.SIGKILL)
            case "freeze":
                pid = self._random.choice(self._engines())
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(0.2, 1.2))
                os.kill(pid, signal.SIGCONT)
            case "all are back":
                await self.all_back()
            case mode:
                await self._post("/pause_generation", mode=mode)
                await asyncio.sleep(self._random.uniform(0.0, 0.5))
                await self._post("/continue_generation")

    async def all_back(self) -> None:
        async with asyncio.timeout(60):
            while len(self._engines()) < 2 or metric(await metrics(self._http), "midflight_engine_quarantined"):
                await asyncio.sleep(0.1)

    def _engines(self) -> list[int]:
        return sorted(self._served.command.parts().get("engine", []))

    async def _post(self, path: str, **body: Any) -> None:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("events", [
    ["recompute", "keep", "abort all", "abort", "drain", "keep", "abort", "abort all", "recompute", "drain", "abort"],
    ["freeze", "keep", "freeze", "abort all", "freeze", "abort"],
    ["kill one", "keep", "abort", "all are back", "kill one", "abort all", "all are back", "kill both", "abort", "recompute"],
], ids=["an operator", "stalls", "deaths"])  # fmt: skip
def test_i5_every_dialect_gives_the_undisturbed_answer_whatever_happens_to_the_engines(served: Served, events: list[str]) -> None:
    async def main() -> None:
        async with served.http() as http:
            plain = await asked(http, "/v1", table("never said")["chat", False], stream=False)
            kinds = table(stop_in(plain.choices[0].text))
            expected = await calm_answers(http, kinds)
            check_calm(expected)
            before = await metrics(http)
            askers, disturber = Askers(http, kinds, expected), Disturber(served, http, seed=len(events))
            async with asyncio.TaskGroup() as group:
                for name in kinds:
                    group.create_task(askers.run(name), name=str(name))
                await disturber.run(events)
                askers.over = True
            await disturber.all_back()
            after = await metrics(http)
            assert askers.num_asked >= len(kinds), "each was compared"
            assert metric(after, "midflight_resumes") >= metric(before, "midflight_resumes") + len(kinds)
            assert metric(after, "midflight_failed_requests") == metric(before, "midflight_failed_requests")

    asyncio.run(asyncio.wait_for(main(), 150))


def check_calm(expected: dict[Name, Told]) -> None:
    """What is compared later says something: streams are whole answers, and every way to end is there."""
    for name, stream in expected:
        if stream:
            check_alike((name, stream), expected[name, True], expected[name, False])
    ended = {name: told.choices[0].ended for (name, _), told in expected.items()}
    assert ended["chat"] == ended["penalties"] == "length" and ended["chat with a stop string"] == "stop"
    assert ended["a forced call"] == "tool_calls" and ended["a schema"] == "stop"
    assert all(len(c.ids) == NUM_TOKENS for c in expected["four choices", True].choices.values())
    assert len(expected["eight prompts", True].choices) == 8
    assert expected["penalties", True].choices[0].num_alternatives == 3 * NUM_TOKENS
