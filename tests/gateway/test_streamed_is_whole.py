"""A streamed answer, joined, is the whole answer: random texts, calls, thoughts, cuts and choices, over every dialect.

`HYPOTHESIS_PROFILE=explore` tries ten thousand cases, new ones each time.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jiter
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.gateway.asked import CONTENTS, frames, streamed
from tests.gateway.offered import DEFAULTS, KEY, Offered, ScriptedGenerator, offered

from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text.formats import MessageFormat
from midflight.types import Chunk, Feature, Finish, FinishReason

NUM_CASES = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 400
ABLE = EngineLimits(4096, 262, features=frozenset(Feature) - {Feature.SAMPLING_MASKS})
THINKS = MessageFormat(scripted_tokenizer(), reasoning="think")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


# --- What the model says --------------------------------------------------------------------------


@dataclass
class CutGenerator(ScriptedGenerator):
    """Each answer has a text of its own, and comes in chunks of these sizes, again and again."""

    sizes: Sequence[int] = (1,)
    place: int = 0
    said: list[str] = field(default_factory=list)

    async def generate(self, answer: Answer, *, affinity: str, may_abort: bool = False, told: Callable[[], None] = lambda: None) -> None:
        text = self.said[answer.index]
        ids = self.tokenizer.encode(text)
        limit = answer.request.sampling.max_tokens
        ids, cut = ids[:limit], len(ids) >= limit
        answer.next_request("attempt")
        start, number = 0, 0
        while answer.finish is None:
            size = self.sizes[number % len(self.sizes)]
            part = ids[start : start + size]
            start, number = start + size, number + 1
            finish = None
            if start >= len(ids):
                finish = Finish(FinishReason.LENGTH) if cut else Finish(FinishReason.STOP, self.tokenizer.encode("<|end|>")[0])
            answer.accept(Chunk(part, tuple(-0.5 for _ in part), 0, 0, finish), vocab_size=2**31)
            told()
            await asyncio.sleep(0.01)  # the readers have their turn


WORDS = st.text(st.sampled_from('ab <>/{}[]":,\\\n\té€'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(-2, 2) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(WORDS | st.just("city"), VALUES, max_size=3)


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A call, in one of the ways in which models write them."""
    name = draw(st.sampled_from(["weather", "weather", "shell", "unknown", ""]))
    arguments: Any = {"input": draw(WORDS)} if name == "shell" else draw(ARGUMENTS)
    escaped = draw(st.booleans())
    if draw(st.integers(0, 5)) == 0:
        arguments = json.dumps(arguments)
    members = [("name", name), (draw(st.sampled_from(["arguments", "parameters"])), arguments)]
    if draw(st.integers(0, 4)) == 0:
        members.reverse()
    written = json.dumps(dict(members), ensure_ascii=escaped, indent=draw(st.sampled_from([None, 1])))
    fault = draw(st.integers(0, 5))
    if fault == 0:
        written = written[: draw(st.integers(0, len(written)))]
    elif fault == 1:
        at = draw(st.integers(0, len(written)))
        written = written[:at] + draw(WORDS) + written[at:]
    space = draw(st.sampled_from(["", "\n"]))
    return f"<tool_call>{space}{written}{space}" + ("" if fault == 2 else "</tool_call>")


THOUGHTS = st.builds(lambda text, end: f"<think>{text}{end}", WORDS, st.sampled_from(["</think>", "\n</think>\n\n", ""]))
TEXTS = st.lists(WORDS | calls() | THOUGHTS, max_size=4).map("".join)
NAMED: dict[str, Callable[[str], Any]] = {
    "chat": lambda name: {"type": "function", "function": {"name": name}},
    "responses": lambda name: {"type": "function", "name": name},
    "messages": lambda name: {"type": "tool", "name": name},
}


@dataclass
class Case:
    dialect: str
    texts: list[str]
    body: dict[str, Any]
    sizes: list[int]


PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "contents": CONTENTS,
    "native": "/generate",
    "tokens": "/inference/v1/generate",
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chats = ["chat", "responses", "messages", "contents"]
    dialect = draw(st.sampled_from([*chats, *chats, "completions", "native", "tokens"]))
    number = draw(st.integers(1, 2)) if dialect in ("chat", "completions", "contents") else 1
    texts = [draw(TEXTS) + draw(st.sampled_from(["", "<|end|>"])) for _ in range(number)]
    longest = max(len(scripted_tokenizer().encode(text)) for text in texts)
    limit = draw(st.integers(1, max(1, longest + 3)))
    stops = draw(st.lists(st.text(st.sampled_from("ab <>{}\n"), min_size=1, max_size=2), max_size=2))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    body: dict[str, Any] = {"model": "policy"}
    match dialect:
        case "chat":
            body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": limit, "n": number}
            body |= {"logprobs": draw(st.booleans()), "return_token_ids": draw(st.booleans())}
        case "responses":
            body |= {"input": "hi", "max_output_tokens": limit, "return_token_ids": draw(st.booleans())}
        case "messages":
            body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": limit}
        case "contents":
            config: dict[str, Any] = {"maxOutputTokens": limit, "candidateCount": number, "responseLogprobs": draw(st.booleans())}
            config |= {"stopSequences": stops} if stops else {}
            config |= {"thinkingConfig": {"includeThoughts": draw(st.booleans())}}
            body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": config, "returnTokenIds": draw(st.booleans())}
        case "completions":
            body |= {"prompt": "hi", "max_tokens": limit, "n": number, "return_token_ids": draw(st.booleans())}
        case "native":
            body = {"text": "hi", "sampling_params": {"max_new_tokens": limit, "stop": stops}}
        case _:
            body = {"token_ids": [97], "sampling_params": {"max_tokens": limit, "stop": stops}}
    if stops and dialect in PATHS and dialect not in ("native", "tokens", "contents"):
        body["stop_sequences" if dialect == "messages" else "stop"] = stops
    if dialect in (*NAMED, "contents") and draw(st.integers(0, 3)):
        body |= draw(tools_of(dialect))
    return Case(dialect, texts, body, sizes)


@st.composite
def tools_of(draw: st.DrawFn, dialect: str) -> dict[str, Any]:
    """Tools, and whether one must be called."""
    chosen = draw(st.sampled_from(["", "auto", "required", "none", "named"]))
    parallel = draw(st.sampled_from([None, True, False]))
    body: dict[str, Any] = {}
    if dialect == "contents":
        body["tools"] = [{"functionDeclarations": [{"name": name, "parameters": SCHEMA} for name in ("weather", "shell")]}]
        mode = {"required": "ANY", "named": "ANY"}.get(chosen, chosen.upper())
        calling = {"mode": mode, **({"allowedFunctionNames": ["weather"]} if chosen == "named" else {})}
        return body | ({"toolConfig": {"functionCallingConfig": calling}} if chosen else {})
    if dialect == "messages":
        body["tools"] = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "shell")]
        if chosen:
            body["tool_choice"] = {"type": {"required": "any", "named": "tool"}.get(chosen, chosen)}
            body["tool_choice"] |= {"name": "weather"} if chosen == "named" else {}
            body["tool_choice"] |= {} if parallel is None or chosen == "none" else {"disable_parallel_tool_use": not parallel}
        return body
    function = {"name": "weather", "parameters": SCHEMA}
    if dialect == "chat":
        body["tools"] = [{"type": "function", "function": function}, {"type": "custom", "custom": {"name": "shell"}}]
    else:
        body["tools"] = [{"type": "function", **function}, {"type": "custom", "name": "shell"}]
    if chosen:
        body["tool_choice"] = NAMED[dialect]("weather") if chosen == "named" else chosen
    if parallel is not None:
        body["parallel_tool_calls"] = parallel
    return body


# --- What is told ---------------------------------------------------------------------------------


def without_ids(value: Any) -> Any:
    """JSON without what is of the request and not of the answer."""
    if isinstance(value, dict):
        return {
            name: without_ids(inner)
            for name, inner in value.items()
            if name not in ("id", "call_id", "created", "created_at", "request_id", "responseId")
        }
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def chat_of_stream(parts: list[Any]) -> dict[str, Any]:
    """The body of a whole chat, from its chunks, as the SDK joins them."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    prompt: dict[str, Any] = {}
    for part in parts:
        usage = part.get("usage") or usage
        prompt |= {name: part[name] for name in ("prompt_token_ids",) if name in part}
        for told in part["choices"]:
            choice = choices.setdefault(
                told["index"], {"message": {"role": "", "content": "", "refusal": None}, "index": told["index"], "logprobs": None}
            )
            message, delta = choice["message"], told["delta"]
            message["role"] += delta.get("role", "")
            message["content"] += delta.get("content") or ""
            for name in ("reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                known = message.setdefault("tool_calls", [])
                if call["index"] == len(known):
                    known.append({"type": call["type"], call["type"]: dict(call[call["type"]])})
                    continue
                kind = known[call["index"]]["type"]
                for name, text in call[kind].items():
                    known[call["index"]][kind][name] += text
            if told.get("logprobs"):
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += told["logprobs"]["content"]
            if "token_ids" in told:
                choice["token_ids"] = choice.get("token_ids", []) + told["token_ids"]
            choice |= {name: told[name] for name in ("finish_reason", "stop_reason", "weight_versions") if name in told}
    for choice in choices.values():
        message = choice["message"]
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
    body = {"object": "chat.completion", "model": "policy", "choices": [choices[k] for k in sorted(choices)], "usage": usage}
    return body | prompt


def chat_of_whole(body: dict[str, Any]) -> dict[str, Any]:
    body = without_ids(body)
    for choice in body["choices"]:
        if choice["logprobs"] is not None and not choice["logprobs"]["content"]:
            choice["logprobs"] = None
        if "token_ids" in choice and not choice["token_ids"]:
            del choice["token_ids"]
    return body


def completion_of_stream(parts: list[Any]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        for told in part["choices"]:
            choice = choices.setdefault(told["index"], {"text": "", "token_ids": []})
            choice["text"] += told["text"]
            choice["token_ids"] += told.get("token_ids") or []
            choice |= {name: told.get(name) for name in ("finish_reason", "stop_reason")}
    return choices


def message_of_stream(parts: list[Any]) -> dict[str, Any]:
    """The body of a whole message, from its events, as the SDK accumulates them."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for part in parts:
        match part["type"]:
            case "message_start":
                message = dict(part["message"])
            case "content_block_start":
                assert part["index"] == len(message["content"])
                message["content"].append(dict(part["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][part["index"]], part["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        inputs[part["index"]] = inputs.get(part["index"], "") + delta["partial_json"]
                        block["input"] = jiter.from_json(inputs[part["index"]].encode(), partial_mode=True)
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case kind:
                        block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
            case "message_delta":
                message |= part["delta"] | {"usage": part["usage"]}
            case _:
                pass
    return message


def contents_of_stream(parts: list[Any]) -> dict[str, Any]:
    """The body of a whole answer, from the pieces of a stream: texts of one kind that follow each other are one part. No piece says nothing
    but the last of an answer that says nothing, because SDKs keep no content that has an empty part."""
    whole: dict[str, Any] = {}
    candidates: dict[int, dict[str, Any]] = {}
    for piece in parts:
        whole |= {name: value for name, value in piece.items() if name != "candidates"}
        for told in piece["candidates"]:
            known = candidates.setdefault(told["index"], {"content": {"role": "model", "parts": []}, "index": told["index"]})
            said = known["content"]["parts"]
            for part in told["content"]["parts"]:
                assert part != {"text": ""} or ("finishReason" in told and not said)
                if said and "text" in part and said[-1].keys() == part.keys():
                    said[-1] = {**part, "text": said[-1]["text"] + part["text"]}
                else:
                    said.append(part)
            if "logprobsResult" in told:
                result = known.setdefault("logprobsResult", {"chosenCandidates": [], "topCandidates": []})
                for name, entries in told["logprobsResult"].items():
                    result[name] += entries
            known |= {name: value for name, value in told.items() if name not in ("content", "index", "logprobsResult")}
    return {**whole, "candidates": [candidates[index] for index in sorted(candidates)]}


def response_of_stream(parts: list[Any]) -> dict[str, Any]:
    """The response of the last event; each item of it is what the events before said."""
    said: dict[int, str] = {}
    done: dict[int, Any] = {}
    for number, part in enumerate(parts):
        assert part["sequence_number"] == number
        kind = part["type"]
        if kind == "response.output_item.added":
            assert part["output_index"] == len(said)
            said[part["output_index"]] = ""
        elif kind.endswith(".delta"):
            said[part["output_index"]] += part["delta"]
        elif kind == "response.output_item.done":
            done[part["output_index"]] = part["item"]
    response = parts[-1]["response"]
    for place, item in enumerate(response["output"]):
        assert without_logprobs(done[place]) == without_logprobs(item) and text_of(item) == said[place]
    assert len(response["output"]) == len(said)
    return response


def without_logprobs(item: Any) -> Any:
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]} if "content" in item else item


def text_of(item: Any) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return item["input"] if item["type"] == "custom_tool_call" else item["arguments"]


async def asked(it: Offered, case: Case, *, stream: bool) -> Any:
    """The answer: a body, or the parts of a stream. A stream of a response is asked for again."""
    session = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
    path = PATHS[case.dialect]
    body = {**case.body, "stream": stream}
    if case.dialect == "contents":
        body = case.body
        path = streamed(path) if stream else path
    if stream and case.dialect in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    base = f"/s/{session.api_key}"
    answer = await it.http.post(base + path, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        it.gateway.close(session.session_id)
        return answer.json()
    parts = frames(answer.text)
    if case.dialect == "responses":
        again = await it.http.get(f"{base}/v1/responses/{parts[0]['response']['id']}?stream=true")
        assert frames(again.text) == parts, "told again, it is the same"
    it.gateway.close(session.session_id)
    return parts


@pytest.mark.timeout(0)  # ten thousand cases take minutes; a case that hangs is found by the virtual clock
@given(cases())
@settings(max_examples=NUM_CASES, deadline=None)
def test_a_streamed_answer_joined_is_the_whole_answer(case: Case) -> None:
    event(case.dialect)

    async def main() -> tuple[Any, Any]:
        generator = CutGenerator(said=case.texts, sizes=case.sizes)
        async with offered(generator, limits=ABLE, message_format=THINKS) as it:
            return await asked(it, case, stream=False), await asked(it, case, stream=True)

    whole, parts = run_virtual(main())
    match case.dialect:
        case "chat":
            assert without_ids(chat_of_stream(parts)) == chat_of_whole(whole)
        case "responses":
            assert without_ids(response_of_stream(parts)) == without_ids(whole)
        case "messages":
            assert without_ids(message_of_stream(parts)) == without_ids(whole)
        case "contents":
            assert without_ids(contents_of_stream(parts)) == without_ids(whole)
        case "completions":
            told = {choice["index"]: choice for choice in whole["choices"]}
            for index, joined in completion_of_stream(parts).items():
                assert joined["text"] == told[index]["text"] and joined["finish_reason"] == told[index]["finish_reason"]
                assert joined["stop_reason"] == told[index].get("stop_reason")
                assert joined["token_ids"] == (told[index].get("token_ids") or [])
        case "native":
            last = parts[-1]
            assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
            assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        case _:
            (choice,) = whole["choices"]
            ids = [token for part in parts for each in part["choices"] for token in each["token_ids"]]
            assert ids == choice["token_ids"]
            ends = [each["finish_reason"] for part in parts for each in part["choices"] if each["finish_reason"]]
            assert ends == [choice["finish_reason"]]
