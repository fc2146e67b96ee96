"""Every dialect asked, streamed and whole, and its answer read into one form: what must be the same whatever the engines do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx2

Asking: TypeAlias = tuple[str, dict[str, Any]]
"""Path and body."""

CONTENTS = "/v1beta/models/policy:generateContent"
CHAT = [{"role": "user", "content": "tell me"}]
_USAGES = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"), ("promptTokenCount", "candidatesTokenCount"))


@dataclass(slots=True)
class Choice:
    text: str = ""
    """Tool calls are written behind it, each as name(arguments)."""
    ended: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Empty in the messages dialect, which has none."""
    num_alternatives: int = 0
    """`top_logprobs` told, over all tokens."""
    versions: list[dict[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Told:
    """What one request was told."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: list[tuple[int, int]] = field(default_factory=list)
    """Prompt and completion tokens, once; native counts them for each choice."""
    num_resumes: int = 0
    """As far as it was told: only native says it. Not compared."""

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Told) and (self.choices, self.usage) == (other.choices, other.usage)


def requests(num_tokens: int, *, stop: str, **more: Any) -> dict[str, Asking]:
    """One request of each kind that answers `num_tokens` at most. `more` goes into all bodies (native: into its sampling)
    but those of messages and contents, which have other fields."""
    ids = {"return_token_ids": True}
    chat = {"model": "policy", "messages": CHAT, "seed": 7, "max_tokens": num_tokens, "logprobs": True, "top_logprobs": 2, **ids, **more}
    prompts = [f"p{k}" for k in range(8)]
    texts = {"model": "policy", "prompt": prompts, "seed": 7, "max_tokens": num_tokens, "stop": stop, "logprobs": 1, **ids, **more}
    response = {"model": "policy", "input": "tell me", "max_output_tokens": num_tokens, "seed": 7, **ids, **more}
    message = {"model": "policy", "messages": CHAT, "max_tokens": num_tokens, "stop_sequences": [stop], "seed": 7, **ids}
    google = {"maxOutputTokens": num_tokens, "stopSequences": [stop], "seed": 7, "responseLogprobs": True, "logprobs": 2}
    contents = {"contents": [{"parts": [{"text": "tell me"}]}], "generationConfig": google, **ids}
    native = {"max_new_tokens": num_tokens, "sampling_seed": 7, **more}
    return {
        "chat": ("/v1/chat/completions", chat),
        "chat with a stop string": ("/v1/chat/completions", {**chat, "stop": stop}),
        "four choices": ("/v1/chat/completions", {**chat, "n": 4}),
        "eight prompts": ("/v1/completions", texts),
        "responses": ("/v1/responses", {**response, "include": ["message.output_text.logprobs"]}),
        "messages": ("/v1/messages", message),
        "contents": (CONTENTS, contents),
        "native": ("/generate", {"input_ids": [97, 98], "return_logprob": True, "sampling_params": native}),
    }


async def asked(http: httpx2.AsyncClient, base: str, asking: Asking, *, stream: bool) -> Told:
    """Waits for the whole answer; `base` ends in /v1, as SDKs want it."""
    path, body = asking
    address = path
    if path == CONTENTS:
        address = streamed(path) if stream else path
    else:
        body = {**body, "stream": stream}
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    answer = await http.post(base.removesuffix("/v1") + address, json=body)
    assert answer.status_code == 200, answer.text
    return told_streamed(path, frames(answer.text)) if stream else told_whole(path, answer.json())


def streamed(path: str) -> str:
    """Google's address for a stream of what another address gives whole."""
    return path.replace(":generateContent", ":streamGenerateContent?alt=sse")


def frames(text: str) -> list[Any]:
    """The data of a stream of server-sent events, without OpenAI's last word."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def told_whole(path: str, body: Any) -> Told:
    told = Told()
    if "usage" in body:
        told.usage.append(_usage(body["usage"]))
    match path:
        case "/v1/chat/completions" | "/v1/completions":
            for found in body["choices"]:
                _add_choice(told.choice(found["index"]), found, found.get("message", {}), found.get("text", ""))
        case "/v1/responses":
            _end_response(told.choice(0), body)
            told.choice(0).text = _response_text(body)
        case "/v1/messages":
            told.choice(0).text = "".join(map(_block_text, body["content"]))
            _end_message(told.choice(0), body, body)
        case _ if path == CONTENTS:
            _add_contents(told, body)
        case _:
            for number, one in enumerate(body if isinstance(body, list) else [body]):
                _set_native(told, number, one)
    return told


def told_streamed(path: str, stream: Iterable[Any]) -> Told:
    """The same, put together from a stream's frames."""
    told = Told()
    calls: dict[tuple[int, int], str] = {}
    for frame in stream:
        assert "error" not in frame, frame
        for found in frame.get("choices", ()):
            _add_choice(told.choice(found["index"]), found, found.get("delta", {}), found.get("text", ""))
            for call in found.get("delta", {}).get("tool_calls", ()):
                place, function = (found["index"], call["index"]), call["function"]
                calls[place] = calls.get(place, "") + (f"{function['name']}(" if "name" in function else "") + function["arguments"]
        if "choices" in frame and frame.get("usage"):
            told.usage.append(_usage(frame["usage"]))
        if path == CONTENTS:
            _add_contents(told, frame)
        elif path == "/generate":
            told.usage.clear()
            told.choices.clear()
            _set_native(told, 0, frame)
        else:
            _add_event(told, frame)
    for (index, _), written in sorted(calls.items()):
        told.choice(index).text += f"{written})"
    return told


def _add_choice(choice: Choice, found: Mapping[str, Any], said: Mapping[str, Any], text: str) -> None:
    """A choice of chat or completions, or one of its frames. Calls in frames come in parts and are gathered elsewhere."""
    choice.text += text + (said.get("content") or "") + (said.get("reasoning_content") or "")
    if "role" in said and "refusal" in said:
        choice.text += "".join(f"{c['function']['name']}({c['function']['arguments']})" for c in said.get("tool_calls", ()))
    choice.ended = found["finish_reason"] or choice.ended
    choice.ids += found.get("token_ids", ())
    choice.versions = found.get("weight_versions", choice.versions)
    logprobs = found.get("logprobs") or {}
    choice.logprobs += logprobs.get("token_logprobs", ()) or [entry["logprob"] for entry in logprobs.get("content", ())]
    choice.num_alternatives += sum(len(entry["top_logprobs"]) for entry in logprobs.get("content", ()))


def _add_event(told: Told, frame: Mapping[str, Any]) -> None:
    match frame.get("type"):
        case "response.output_text.delta":
            told.choice(0).text += frame["delta"]
        case "response.completed" | "response.incomplete":
            assert told.choice(0).text == _response_text(frame["response"])
            _end_response(told.choice(0), frame["response"])
            told.usage.append(_usage(frame["response"]["usage"]))
        case "content_block_delta":
            told.choice(0).text += frame["delta"]["text"]
        case "message_delta":
            _end_message(told.choice(0), frame["delta"], frame)
            told.usage.append(_usage(frame["usage"]))
        case _:
            pass


def _response_text(body: Any) -> str:
    return "".join(part["text"] for item in body["output"] for part in item["content"])


def _end_response(choice: Choice, body: Any) -> None:
    choice.ended, choice.ids, choice.versions = body["status"], body["token_ids"], body["weight_versions"]
    choice.logprobs = [entry["logprob"] for item in body["output"] for part in item["content"] for entry in part["logprobs"]]


def _block_text(block: Any) -> str:
    return block["text"]


def _end_message(choice: Choice, ending: Any, ids: Any) -> None:
    choice.ended = f"{ending['stop_reason']} {ending['stop_sequence']}"
    choice.ids, choice.versions = ids["token_ids"], ids["weight_versions"]


def _add_contents(told: Told, body: Any) -> None:
    """A whole answer of Google's dialect, or a piece of its stream."""
    for found in body["candidates"]:
        choice = told.choice(found["index"])
        choice.text += "".join(map(_block_text, found["content"]["parts"]))
        choice.ended = found.get("finishReason", choice.ended)
        choice.ids += found.get("token_ids", ())
        choice.versions = found.get("weight_versions", choice.versions)
        choice.logprobs += [entry["logProbability"] for entry in found["logprobsResult"]["chosenCandidates"]]
        choice.num_alternatives += sum(len(entry["candidates"]) for entry in found["logprobsResult"]["topCandidates"])
    if "usageMetadata" in body:
        told.usage.append(_usage(body["usageMetadata"]))


def _set_native(told: Told, index: int, body: Any) -> None:
    """Frames are cumulative: each is all there is so far."""
    meta = body["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    ended = (meta["finish_reason"] or {}).get("type", "")
    told.choices[index] = Choice(body["text"], ended, body["output_ids"], logprobs, versions=meta.get("weight_versions", []))
    told.usage.append((meta["prompt_tokens"], meta["completion_tokens"]))
    told.num_resumes = meta.get("num_retractions", 0)


def _usage(usage: Mapping[str, int]) -> tuple[int, int]:
    names = next(names for names in _USAGES if names[0] in usage)
    return usage[names[0]], usage[names[1]]
