"""On real processes: three streams at once go on through twenty weight updates, with no gap, no duplicate and a whole budget."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gateway.asked import CHAT, asked

from midflight.text import Tokenizer

from .processes import CONFIG, Command

NUM_UPDATES = 20
NUM_TOKENS = 8000
TOKENS_BETWEEN = 20
"""Tokens that the chat must gain before the next version is published, so that each version has some."""
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=8192")


@dataclass
class Streamed:
    """What a client of a stream was told, piece by piece, and at the end."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    versions: list[dict[str, int]] = field(default_factory=list)
    ended: str | None = None
    grew: asyncio.Event = field(default_factory=asyncio.Event)


async def read_chat(client: openai.AsyncOpenAI, told: Streamed) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    stream = await client.chat.completions.create(
        model="policy", messages=CHAT, max_tokens=NUM_TOKENS, seed=1, stream=True, extra_body=extra
    )  # type: ignore[call-overload]
    async for chunk in stream:
        (choice,) = chunk.choices
        told.text += choice.delta.content or ""
        told.ids += choice.model_extra.get("token_ids", ())
        told.ended = choice.finish_reason or told.ended
        told.versions = choice.model_extra.get("weight_versions", told.versions)
        told.grew.set()


async def read_response(client: openai.AsyncOpenAI, told: Streamed) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True, "seed": 2}
    stream = await client.responses.create(model="policy", input="go", max_output_tokens=NUM_TOKENS, stream=True, extra_body=extra)
    async for event in stream:
        if event.type == "response.output_text.delta":
            told.text += event.delta
        elif event.type == "response.incomplete":
            assert event.response.output_text == told.text and event.response.usage is not None
            assert event.response.usage.output_tokens == NUM_TOKENS
            extra = event.response.model_extra or {}
            told.ids, told.versions, told.ended = extra["token_ids"], extra["weight_versions"], "length"


async def read_message(http: httpx2.AsyncClient, base: str, told: Streamed) -> None:
    body = {"model": "policy", "messages": CHAT, "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "seed": 3, "return_token_ids": True}
    answer = await asked(http, base, ("/v1/messages", body), stream=True)
    choice = answer.choices[0]
    assert answer.usage[0][1] == NUM_TOKENS
    told.text, told.ids, told.versions = choice.text, choice.ids, choice.versions
    told.ended = {"max_tokens None": "length"}[choice.ended]


def make_versions(model: Path, folder: Path) -> list[Path]:
    """Weights that differ from version to version as they do in training: a little everywhere."""
    folder.mkdir()
    tensors, noise = load_file(model / "model.safetensors"), torch.Generator().manual_seed(5)
    made = []
    for version in range(1, NUM_UPDATES + 1):
        tensors = {name: t + 0.02 * torch.randn(t.shape, generator=noise).to(t.dtype) for name, t in tensors.items()}
        made.append(folder / f"{version}.safetensors")
        save_file(tensors, made[-1])
    return made


async def publish(http: httpx2.AsyncClient, files: Sequence[Path], told: Streamed) -> int:
    """Plays the trainer; says how many versions were live before the chat had ended."""
    num_live = 0

    async def call(verb: str, **body: Any) -> Any:
        answer = await http.post(f"/midflight/v1/{verb}", json=body, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    for version, file in enumerate(files, start=1):
        wanted = len(told.ids) + TOKENS_BETWEEN
        while len(told.ids) < wanted and told.ended is None:
            told.grew.clear()
            await told.grew.wait()
        batch = await call("take", train_version=version - 1)
        await call("done", lease=batch["lease"], version=version)
        live = await call("weights", version=version, file=str(file))
        assert live["served_version"] == version
        num_live += told.ended is None
    return num_live


def check_whole(told: Streamed, tokenizer: Tokenizer) -> None:
    """Exactly the budget; the text is that of the ids, special ones aside; every token has a version, and versions only grow."""
    assert told.ended == "length" and len(told.ids) == NUM_TOKENS
    assert told.text == tokenizer.decode(told.ids, skip_special=True)
    assert told.versions[0]["start"] == 0 and told.versions[-1]["end"] == NUM_TOKENS
    for one, next_one in itertools.pairwise(told.versions):
        assert one["end"] == next_one["start"] and one["version"] < next_one["version"]


def check_record(record: dict[str, Any], told: Streamed) -> None:
    """What the session recorded is what the client was told. `min_tokens`, of the message, is not the policy's own sampling."""
    assert record["num_tokens"] + record["masked"].get("not_policy_sampled", 0) == NUM_TOKENS and record["failed_requests"] == 0
    for row in record["rows"]:
        assert row["token_ids"][-NUM_TOKENS:] == told.ids
        assert row["versions"][-NUM_TOKENS:] == [s["version"] for s in told.versions for _ in range(s["start"], s["end"])]
        assert all(-50 < p <= 0 for p in row["logprobs"][-NUM_TOKENS:])


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_streams_of_three_dialects_go_on_through_twenty_weight_updates(tmp_path: Path, mode: str) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    sizes = [word for size in SIZES for word in ("--set", f"model.{size}")]
    made = Command("new-model", model, *sizes, folder=tmp_path / "making")
    assert made.wait() == 0, made.said
    (tmp_path / "small.toml").write_text(CONFIG.replace("max_context = 64", "max_context = 8192"))
    sets = (f"model.path={model}", f"rollout.pause_mode={mode}", "engine.count=2")
    command = Command("rollouts", "small.toml", "--folder", run, *(w for s in sets for w in ("--set", s)), folder=tmp_path)
    try:
        command.until(lambda: (run / "endpoint.json").exists(), "endpoint.json")
        endpoint = json.loads((run / "endpoint.json").read_text())
        asyncio.run(asyncio.wait_for(streams_through(endpoint, Tokenizer.load(model), make_versions(model, tmp_path / "made")), 120))
    finally:
        command.end()


async def streams_through(endpoint: dict[str, Any], tokenizer: Tokenizer, files: Sequence[Path]) -> None:
    chat, response, message = Streamed(), Streamed(), Streamed()
    headers = {"Authorization": f"Bearer {endpoint['control_token']}"}
    async with httpx2.AsyncClient(base_url=endpoint["url"], headers=headers, timeout=120) as http:
        sessions = [(await http.post("/midflight/v1/sessions", json={})).json() for _ in range(3)]
        first, second = (openai.AsyncOpenAI(base_url=s["base_url"], api_key="none", max_retries=0) for s in sessions[:2])
        async with first, second, asyncio.TaskGroup() as group:
            group.create_task(read_chat(first, chat))
            group.create_task(read_response(second, response))
            group.create_task(read_message(http, sessions[2]["base_url"], message))
            num_live = await publish(http, files, chat)
        records = [(await http.post(f"/midflight/v1/sessions/{s['session_id']}/end", json={})).json() for s in sessions]
    assert num_live == NUM_UPDATES, "all while the streams went on"
    for told, record in zip((chat, response, message), records, strict=True):
        check_whole(told, tokenizer)
        check_record(record, told)
    assert [span["version"] for span in chat.versions] == list(range(NUM_UPDATES + 1))
    assert min(len(response.versions), len(message.versions)) > NUM_UPDATES // 2
