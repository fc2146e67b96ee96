"""Bodies and routes of clients that were written for an SGLang or a vLLM server, as they send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest
from tests.gateway.site import Site

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.server_routes import NOT_HERE
from midflight.testing.script import Replies, Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature, GroupKey, RolloutKey, SamplingParams

HI = [{"role": "user", "content": "hi"}]
ABLE = replace(CAPABLE, features=CAPABLE.features | {Feature.PROMPT_LOGPROBS})
KEY = RolloutKey(GroupKey(epoch=0, index=3, attempt=0), sample=1)
IDS = [104, 105, 33]
SLIME = {
    "sampling_params": {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 40, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
    },
    "return_logprob": True,
    "input_ids": IDS,
}  # fmt: skip
AREAL = {
    "input_ids": IDS,
    "image_data": [],
    "sampling_params": {
        "top_p": 1.0, "top_k": -1, "max_new_tokens": 40, "temperature": 0.0, "stop_token_ids": [], "frequency_penalty": 0.0,
    },
    "return_logprob": True,
    "stream": False,
}  # fmt: skip
VERL = {
    "input_ids": IDS,
    "sampling_params": {
        "n": 1, "max_new_tokens": 40, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_k": -1, "top_p": 1, "ignore_eos": False,
    },
    "return_logprob": True,
    "image_data": None,
    "rid": "verl-1",
}  # fmt: skip
SKYRL = {
    "input_ids": [IDS, IDS[:2]],
    "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 40, "min_new_tokens": 0},
}
ENDPOINT = {  # sglang's RuntimeEndpoint
    "text": "hi!",
    "sampling_params": {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 40, "min_new_tokens": 0, "stop": [],
        "stop_token_ids": None, "stop_regex": [], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
    },
    "logprob_start_len": None,
}  # fmt: skip
VERIFIERS = {
    "model": "policy",
    "token_ids": IDS,
    "sampling_params": {
        "temperature": 1.0, "max_tokens": 40, "stop_token_ids": [257], "logprobs": 1, "skip_special_tokens": False, "n": 1,
    },
    "cache_salt": "3",
}  # fmt: skip


def engine(said: str = "one two.") -> ScriptedEngine:
    return ScriptedEngine(script=Replies(lambda prompt: said), capabilities=ABLE)


@dataclass
class Served:
    gateway: Gateway
    site: Site
    http: httpx2.AsyncClient

    async def post(self, path: str, body: object, *, status: int = 200) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


@asynccontextmanager
async def served(*engines: ScriptedEngine) -> AsyncIterator[Served]:
    site = Site(engines or [engine()])
    site.gateway._planner._limits = site.gateway.limits = EngineLimits(4096, 262, features=ABLE.features)
    async with site.http() as http:
        yield Served(site.gateway, site, http)


@pytest.mark.parametrize("body", [SLIME, AREAL, VERL, SKYRL, ENDPOINT], ids=["slime", "areal", "verl", "skyrl", "sglang"])
def test_native_bodies_of_trainers_are_answered(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with served() as it:
            told = await it.post("/generate", body)
            for answer in told if isinstance(told, list) else [told]:
                assert answer["text"].startswith("one two.") and answer["meta_info"]["finish_reason"]["type"] == "stop"
                if body.get("return_logprob"):
                    assert [row[1] for row in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]

    run_virtual(main())


def test_text_with_special_tokens_and_stop_strings_is_what_the_ids_say() -> None:
    async def main() -> None:
        tokenizer = scripted_tokenizer()
        async with served() as it:
            whole = await it.post("/generate", SLIME)
            assert whole["text"] == tokenizer.decode(whole["output_ids"]) == "one two.<|end|>"
            for skips, keeps, text in ((None, None, "one"), (True, True, "one t"), (False, None, "one")):
                params = {"stop": " t", "max_new_tokens": 20, "skip_special_tokens": skips, "no_stop_trim": keeps}
                body = {"input_ids": IDS, "sampling_params": params}
                assert (await it.post("/generate", body))["text"] == text
                answer = await it.http.post("/generate", json=body | {"stream": True})
                frames = [httpx2.Response(200, text=line[6:]).json() for line in answer.text.split("\n\n") if line.startswith("data: {")]
                assert [frame["text"] for frame in frames if not text.startswith(frame["text"])] == []
                assert frames[-1]["text"] == text

    run_virtual(main())


def test_no_token_is_generated_where_none_is_wanted_and_none_is_recorded() -> None:
    async def main() -> None:
        async with served() as it:
            handle = it.gateway.open(KEY, sampling=SamplingParams(), tracked=True)
            told = await it.post(f"/s/{handle.api_key}/generate", {"text": "hi!", "sampling_params": {"max_new_tokens": 0}})
            assert told["text"] == "" and told["output_ids"] == [] and told["meta_info"]["prompt_tokens"] == 3
            assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
            assert not it.site.engines[0].requests
            assert it.gateway.close(handle.session_id).num_turns == 0

    run_virtual(main())


def test_tokens_of_a_prompt_are_scored_where_a_client_asks() -> None:
    """The scripted engine holds id i for -(1 + i % 8) / 8 likely, and names the ids from 0 on as alternatives."""

    async def main() -> None:
        async with served() as it:
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "return_text_in_logprobs": True}
            meta = (await it.post("/generate", body | {"logprob_start_len": 0}))["meta_info"]
            assert meta["input_token_logprobs"] == [[None, 104, "h"], [-0.25, 105, "i"], [-0.25, 33, "!"]]
            meta = (await it.post("/generate", body | {"logprob_start_len": 2, "top_logprobs_num": 2}))["meta_info"]
            assert meta["input_token_logprobs"] == [[-0.25, 33, "!"]]
            assert [[p, i] for p, i, _ in meta["input_top_logprobs"][0]] == [[-0.125, 0], [-0.25, 1]]
            assert "input_token_logprobs" not in (await it.post("/generate", body))["meta_info"]
            choice = (await it.post("/v1/completions", {"model": "policy", "prompt": "hi!", "max_tokens": 1, "prompt_logprobs": 1}))[
                "choices"
            ][0]
            first, second, third = choice["prompt_logprobs"]
            assert first is None and second["105"]["logprob"] == third["33"]["logprob"] == -0.25 and second["0"]["rank"] == 1

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_of_a_chat_is_scored_once_for_all_choices(stream: bool) -> None:
    async def main() -> None:
        async with served() as it:
            body = {"model": "policy", "messages": HI, "max_tokens": 2, "n": 2, "prompt_logprobs": 2, "return_token_ids": True}
            answer = await it.http.post("/v1/chat/completions", json=body | {"stream": stream})
            assert answer.status_code == 200, answer.text
            texts = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")] if stream else [answer.text]
            told = [each for each in map(json.loads, texts) if "prompt_logprobs" in each]
            assert len(told) == 1 and told[0]["prompt_logprobs"][0] is None
            ids = told[0]["prompt_token_ids"]
            assert len(told[0]["prompt_logprobs"]) == len(ids) and ids[1:3] == [104, 105]
            for token_id, scored in zip(ids[1:], told[0]["prompt_logprobs"][1:], strict=True):
                assert scored[str(token_id)]["logprob"] == -(1 + token_id % 8) / 8 and scored["0"]["rank"] == 1

    run_virtual(main())


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_is_told_again_with_its_log_probabilities(max_tokens: int) -> None:
    async def main() -> None:
        async with served() as it:
            body = {"model": "policy", "prompt": "hi!", "max_tokens": max_tokens, "echo": True, "logprobs": 1, "seed": 1}
            choice = (await it.post("/v1/completions", body))["choices"][0]
            assert choice["text"] == "hi!" + "one"[:max_tokens]
            told = choice["logprobs"]
            assert told["tokens"] == list(choice["text"]) and told["text_offset"] == list(range(3 + max_tokens))
            assert told["token_logprobs"][:3] == [None, -0.25, -0.25] and told["top_logprobs"][1] == {"\x00": -0.125, "i": -0.25}
            assert len(told["top_logprobs"]) == len(told["token_logprobs"]) == 3 + max_tokens
            plain = (await it.post("/v1/completions", body | {"logprobs": None, "max_tokens": 2}))["choices"][0]
            assert plain["text"] == "hi!on" and plain["logprobs"] is None
            answer = await it.http.post("/v1/completions", json=body | {"stream": True})
            frames = [httpx2.Response(200, text=line[6:]).json() for line in answer.text.split("\n\n") if line.startswith("data: {")]
            assert "".join(frame["choices"][0]["text"] for frame in frames) == choice["text"]
            assert [p for f in frames for p in (f["choices"][0]["logprobs"] or {}).get("token_logprobs", ())] == told["token_logprobs"]

    run_virtual(main())


def test_prompts_are_not_scored_by_engines_that_cannot() -> None:
    async def main() -> None:
        site = Site()
        async with site.http() as http:
            for path, body, param in (
                ("/generate", {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
                ("/v1/completions", {"model": "policy", "prompt": "hi", "echo": True, "logprobs": 1}, "echo"),
                ("/v1/completions", {"model": "policy", "prompt": "hi", "prompt_logprobs": 1}, "prompt_logprobs"),
                ("/v1/chat/completions", {"model": "policy", "messages": HI, "prompt_logprobs": 0}, "prompt_logprobs"),
                (
                    "/inference/v1/generate",
                    {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 1}},
                    "sampling_params.prompt_logprobs",
                ),
            ):
                answer = await http.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run_virtual(main())


def test_a_prompt_is_scored_by_another_engine_where_one_dies() -> None:
    async def main() -> None:
        first, second = (ScriptedEngine(name, script=Replies(lambda prompt: "one"), capabilities=ABLE) for name in ("a", "b"))
        first.die()
        second.die()
        async with served(first, second) as it:
            asking = asyncio.create_task(
                it.post("/v1/completions", {"model": "policy", "prompt": "hi!", "max_tokens": 1, "prompt_logprobs": 0})
            )
            await asyncio.sleep(5)
            second.revive()
            assert [at and list(at) for at in (await asking)["choices"][0]["prompt_logprobs"]] == [None, ["105"], ["33"]]

    run_virtual(main())


def test_tokens_in_and_tokens_out_with_log_probabilities_by_id() -> None:
    async def main() -> None:
        tokenizer = scripted_tokenizer()
        async with served() as it:
            handle = it.gateway.open(KEY, sampling=SamplingParams(max_tokens=9), tracked=True)
            told = await it.post(f"/s/{handle.api_key}/inference/v1/generate", VERIFIERS | {"request_id": "mine", "return_token_ids": True})
            (choice,) = told["choices"]
            assert tokenizer.decode(choice["token_ids"]) == "one two.<|end|>" and told["request_id"] == "mine"
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
            assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [1] * 9
            assert choice["finish_reason"] == "stop" and told["prompt_token_ids"] == IDS and told["usage"]["completion_tokens"] == 9
            answer = await it.http.post("/inference/v1/generate", json=VERIFIERS | {"stream": True})
            frames = [httpx2.Response(200, text=line[6:]).json() for line in answer.text.split("\n\n") if line.startswith("data: {")]
            assert [i for frame in frames for c in frame["choices"] for i in c["token_ids"]] == choice["token_ids"]
            assert frames[-1]["choices"][0]["finish_reason"] == "stop"
            (row,) = it.gateway.close(handle.session_id).rows
            assert row.token_ids.tolist() == [*IDS, *choice["token_ids"]] and row.loss_mask.tolist() == [False] * 3 + [True] * 9

    run_virtual(main())


@pytest.mark.parametrize("path", ["/pause_generation", "/pause?mode=abort"])
def test_a_pause_by_abort_returns_to_clients_of_servers_what_they_have_and_to_no_other(path: str) -> None:
    async def main() -> None:
        async with served(ScriptedEngine(script=Script(mean_length=None), capabilities=ABLE)) as it:
            asked = [
                asyncio.create_task(it.post("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 90}})),
                asyncio.create_task(it.post("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 90}})),
                asyncio.create_task(it.post("/v1/completions", {"model": "policy", "prompt": IDS, "max_tokens": 90})),
            ]
            await asyncio.sleep(0.3)
            await it.post(path, {"mode": "abort"} if "?" not in path else {})
            assert (await it.http.get("/is_paused")).json() == {"is_paused": True}
            native, tokens = await asked[0], await asked[1]
            assert native["meta_info"]["finish_reason"]["type"] == tokens["choices"][0]["finish_reason"] == "abort"
            assert 0 < len(native["output_ids"]) < 90 > len(tokens["choices"][0]["token_ids"]) > 0
            assert not asked[2].done()
            await it.post("/resume", {})
            assert (await asked[2])["usage"]["completion_tokens"] == 90

    run_virtual(main())


def test_a_pause_without_a_mode_is_the_cheapest_one_on_every_route() -> None:
    async def main() -> None:
        for path, end in (("/pause_generation", "/continue_generation"), ("/pause", "/resume")):
            async with served() as it:
                await it.post(path, {})
                assert it.site.engines[0].paused == "keep"
                assert (await it.http.post(end)).status_code == 200
                assert it.site.engines[0].paused is None

    run_virtual(main())


def test_what_servers_are_asked_beside_answers() -> None:
    async def main() -> None:
        async with served() as it:
            for path in ("/model_info", "/get_model_info"):
                told = (await it.http.get(path)).json()
                assert told["model_path"] == "policy" and told["is_generation"] and told["weight_version"] == "0"
            for path in ("/server_info", "/get_server_info"):
                assert (await it.http.get(path)).json()["internal_states"][0]["num_running_reqs"] == 0
            assert (await it.http.get("/get_weight_version")).json() == {"weight_version": "0"}
            assert (await it.http.get("/v1/loads?include=core,disagg,queues")).json()["loads"][0]["num_total_reqs"] == 0
            assert (await it.http.get("/workers")).json()["workers"][0]["url"] == "http://memory"
            assert [(await it.http.get(path)).status_code for path in ("/health_generate", "/ready", "/version", "/flush_cache")] == [
                200
            ] * 4
            assert (await it.post("/flush_cache", {}))["status"] == "ok"
            assert (await it.post("/abort_requests", {}))["aborted"] == 0
            for path, sentence in NOT_HERE.items():
                assert sentence in (await it.post(path, {}, status=501))["error"]["message"]

    run_virtual(main())


def test_texts_and_ids_are_translated_as_answers_would_be() -> None:
    async def main() -> None:
        async with served() as it:
            told = await it.post("/tokenize", {"model": "policy", "prompt": "hi!", "return_token_strs": True})
            assert told == {"count": 3, "max_model_len": 4096, "tokens": IDS, "token_strs": ["h", "i", "!"]}
            assert await it.post("/detokenize", {"tokens": IDS}) == {"prompt": "hi!", "text": "hi!"}
            chat = {"messages": [{"role": "user", "content": "hi!"}]}
            ids = (await it.post("/tokenize", chat))["tokens"]
            assert it.gateway.tokenizer.decode(ids) == "<|user|>hi!<|end|><|assistant|>"
            assert (await it.post("/tokenize", chat | {"add_generation_prompt": False}))["tokens"] == ids[:-1]
            for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [9999]}), ("/detokenize", {"tokens": "x"}), ("/tokenize", [])):
                assert (await it.http.post(path, json=body)).status_code == 400

    run_virtual(main())
