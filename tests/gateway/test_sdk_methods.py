"""Every method of the SDKs of OpenAI, Anthropic and Google is answered, or refused by name with what to use instead."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.offered import KEY, RecordingControl, ScriptedGenerator, make_gateway, offered

from midflight.gateway.http.http import build_app
from midflight.gateway.http.not_offered import NOT_OFFERED
from midflight.testing.virtual_time import run_virtual
from midflight.types import SamplingParams

ROOT = Path(__file__).parents[2]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "methods.py"))


OF_OTHER_CLIENTS = {f"/v1beta/models/*:{verb}" for verb in ("embedContent", "predict", "predictLongRunning")}
"""Verbs of Google's that its older SDKs and those for other languages have."""


def test_all_sdks_are_looked_through() -> None:
    names = {(method.sdk, method.name) for method in TOOL["methods"]()}
    assert {
        ("openai", "conversations.items.create"),
        ("openai", "responses.input_tokens.count"),
        ("anthropic", "messages.batches.results"),
        ("google-genai", "models.generate_content_stream"),
        ("google-genai", "environments.files.download"),
    } <= names
    assert len(names) > 800


def test_the_page_of_methods_is_as_made() -> None:
    assert (ROOT / "docs" / "methods.md").read_text() == TOOL["page"](), "run: python tools/methods.py docs/methods.md"


def test_every_method_is_answered_or_refused_by_its_name_and_no_row_of_refusals_is_without_a_method() -> None:
    needed = set[str]()

    async def main() -> None:
        async with offered() as it:
            sampling = SamplingParams(max_tokens=8)
            session, answering = [it.gateway.open(KEY, sampling=sampling, tracked=True) for _ in range(2)]
            for method in TOOL["methods"]():
                if method.verb in (TOOL["LOCAL"], TOOL["SOCKET"], TOOL["VERTEX"]):
                    continue
                headers = {"anthropic-version": "2023-06-01"} if method.sdk == "anthropic" else {}
                one = answering if TOOL["is_answered"](method) else session
                for prefix in ("", f"/s/{one.api_key}"):
                    answer = await it.http.request(method.verb, prefix + method.example, headers=headers)
                    error = answer.json().get("error") or {}
                    if TOOL["is_answered"](method):
                        assert answer.status_code in (200, 400, 404) and "not offered" not in error.get("message", ""), method
                        continue
                    needed.add(method.beginning)
                    sentence = f"{method.verb} {method.example} is not offered here: {NOT_OFFERED[method.beginning]}."
                    assert (answer.status_code, error["message"]) == (404, sentence) and TOOL["refused_by"](method) == sentence
                    if method.sdk == TOOL["GOOGLE"]:
                        assert error["status"] == "NOT_FOUND"
                    else:
                        assert error["type"] == ("not_found_error" if headers else "invalid_request_error")
            assert it.gateway.close(session.session_id).failed_requests == 0

    run_virtual(main())
    needed.update(method.beginning for method in TOOL["methods"]() if method.verb == TOOL["SOCKET"])
    assert needed | OF_OTHER_CLIENTS == set(NOT_OFFERED)


REFUSED: list[Callable[[Any, Any], Coroutine[Any, Any, Any]]] = [
    lambda ai, _: ai.embeddings.create(model="policy", input="hi"),
    lambda ai, _: ai.responses.compact(model="policy", input="hi"),
    lambda ai, _: ai.chat.completions.retrieve("chatcmpl-1"),
    lambda ai, _: ai.vector_stores.search("vs_1", query="hi"),
    lambda ai, _: ai.fine_tuning.jobs.create(model="policy", training_file="f"),
    lambda ai, _: ai.models.delete("policy"),
    lambda _, claude: claude.messages.batches.create(requests=[]),
    lambda _, claude: claude.messages.batches.results("b"),
    lambda _, claude: claude.beta.files.list(),
]


@pytest.mark.parametrize("asked", REFUSED)
def test_the_sdks_raise_the_sentence_at_once(asked: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> None:
    async def main() -> None:
        async with offered() as it:
            ai = openai.AsyncOpenAI(base_url="http://memory/v1", api_key="k", http_client=it.http)
            claude = anthropic.AsyncAnthropic(base_url="http://memory", api_key="k", http_client=it.http)
            with pytest.raises((openai.NotFoundError, anthropic.NotFoundError), match="is not offered here: "):
                await asked(ai, claude)

    run_virtual(main())


@pytest.mark.parametrize(("path", "says"), [("/v1/responses", True), ("/v1/realtime", True), ("/elsewhere", False)])
@pytest.mark.parametrize("able", [True, False])
def test_a_web_socket_that_is_not_there_is_refused_as_http_where_the_server_can(path: str, says: bool, able: bool) -> None:
    sent: list[dict[str, Any]] = []

    async def main() -> None:
        app = build_app(make_gateway(ScriptedGenerator()), RecordingControl())  # type: ignore[arg-type]
        scope = {
            "type": "websocket",
            "path": path,
            "headers": [],
            "query_string": b"",
            "subprotocols": [],
            "server": ("h", 1),
            "scheme": "ws",
        }
        extensions = {"websocket.http.response": {}} if able else {}

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app({**scope, "extensions": extensions}, receive, send)

    run_virtual(main())
    if says and able:
        assert sent[0]["status"] == 404
        assert f"WebSocket {path} is not offered here" in sent[1]["body"].decode()
    else:
        assert [message["type"] for message in sent] == ["websocket.close"]
