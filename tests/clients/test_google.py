"""The `google-genai` SDK, unmodified: contents, streams, chats, functions, schemas, counting; sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from conftest import OneSession

genai = pytest.importorskip("google.genai")
from google.genai import errors, types  # noqa: E402


class Colour(BaseModel):
    colour: Literal["red", "green"]
    number: int


SEED = 1
"""Random weights may add members to an object, which the schema allows, until its answer is cut."""
CLIENTS: list[Any] = []


def client(url: str, key: str = "any") -> Any:
    """It is kept, because one that nobody holds closes its connections."""
    CLIENTS.append(genai.Client(api_key=key, http_options={"base_url": url}))
    return CLIENTS[-1]


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    return f"sunny in {city}"


DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="get_weather",
            description="The weather in a city.",
            parameters={"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]},
        )
    ]
)
BY_HAND = types.AutomaticFunctionCallingConfig(disable=True)


def test_the_model_is_listed(served: str) -> None:
    assert [model.name for model in client(served).models.list()] == ["models/policy"]
    assert client(served).models.get(model="policy").input_token_limit == 4096


def test_contents_are_answered_and_the_same_seed_streams_the_same(served: str) -> None:
    config = types.GenerateContentConfig(seed=5, temperature=1.0, max_output_tokens=24, system_instruction="Be brief.")
    ask: dict[str, Any] = {"model": "policy", "contents": "hello", "config": config}
    whole = client(served).models.generate_content(**ask)
    pieces = list(client(served).models.generate_content_stream(**ask))
    assert "".join(piece.text or "" for piece in pieces) == whole.text
    last = pieces[-1]
    assert last.candidates[0].finish_reason == whole.candidates[0].finish_reason
    assert last.usage_metadata == whole.usage_metadata
    assert 1 <= whole.usage_metadata.candidates_token_count <= 24


def test_a_stop_sequence_ends_the_text(scripted: str) -> None:
    config = types.GenerateContentConfig(stop_sequences=["four"])
    answer = client(scripted).models.generate_content(model="policy", contents="count", config=config)
    assert (answer.text, answer.candidates[0].finish_reason.name) == ("one two three ", "STOP")


def test_a_function_is_called_and_its_result_is_used(scripted: str) -> None:
    config = types.GenerateContentConfig(tools=[DECLARED], automatic_function_calling=BY_HAND)
    asked = [types.Content(role="user", parts=[types.Part(text="What is the weather in Paris?")])]
    first = client(scripted).models.generate_content(model="policy", contents=asked, config=config)
    (call,) = first.function_calls
    assert (call.name, call.args) == ("get_weather", {"city": "Paris"}) and call.id
    result = types.Part.from_function_response(name=call.name, response={"output": "sunny"})
    contents = [*asked, first.candidates[0].content, types.Content(role="user", parts=[result])]
    second = client(scripted).models.generate_content(model="policy", contents=contents, config=config)
    assert second.text == "The tool said: sunny."


def test_the_sdk_calls_functions_of_python_by_itself(session: OneSession) -> None:
    config = types.GenerateContentConfig(tools=[get_weather])
    answer = client(session.root).models.generate_content(model="policy", contents="What is the weather in Paris?", config=config)
    assert answer.text == "The tool said: sunny in Paris."
    session.check_turns(CALL, FOUND)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FOUND = "The tool said: sunny in Paris."


def test_a_streamed_chat_is_one_row_though_its_sdk_keeps_each_piece(session: OneSession) -> None:
    chat = client(session.root).chats.create(model="policy", config=types.GenerateContentConfig(tools=[get_weather]))
    assert "".join(piece.text or "" for piece in chat.send_message_stream("count")) == "one two three four five"
    assert chat.get_history(curated=True) == chat.get_history(), "the SDK found no piece empty"
    told = [piece.text or "" for piece in chat.send_message_stream("What is the weather in Paris?")]
    assert "".join(told) == FOUND
    session.check_turns("one two three four five", CALL, FOUND)


def test_parallel_calls_stream_whole(scripted: str) -> None:
    config = types.GenerateContentConfig(tools=[DECLARED], automatic_function_calling=BY_HAND)
    pieces = client(scripted).models.generate_content_stream(model="policy", contents="weather in Paris and Rome", config=config)
    calls = [call for piece in pieces for call in piece.function_calls or ()]
    assert [call.args["city"] for call in calls] == ["Paris", "Rome"] and len({call.id for call in calls}) == 2


def test_a_forced_call_and_a_schema_hold_for_random_weights(served: str) -> None:
    paint = types.FunctionDeclaration(name="paint", parameters_json_schema=Colour.model_json_schema())
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["paint"])
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[paint])],
        tool_config=types.ToolConfig(function_calling_config=calling),
        automatic_function_calling=BY_HAND,
        max_output_tokens=400,
        seed=SEED,
    )
    answer = client(served).models.generate_content(model="policy", contents="go", config=config)
    assert answer.function_calls[0].args["colour"] in ("red", "green")
    for form in ({"response_schema": Colour}, {"response_json_schema": Colour.model_json_schema()}):
        config = types.GenerateContentConfig(response_mime_type="application/json", max_output_tokens=400, seed=SEED, **form)
        answer = client(served).models.generate_content(model="policy", contents="go", config=config)
        assert json.loads(answer.text)["colour"] in ("red", "green")
    config = types.GenerateContentConfig(response_mime_type="text/x.enum", response_schema={"type": "STRING", "enum": ["yes", "no"]})
    assert client(served).models.generate_content(model="policy", contents="go", config=config).text in ("yes", "no")


def test_tokens_are_counted_as_an_answer_counts_them(scripted: str) -> None:
    counted = client(scripted).models.count_tokens(model="policy", contents="hello")
    answer = client(scripted).models.generate_content(model="policy", contents="hello")
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count


def test_log_probabilities_are_told(served: str) -> None:
    config = types.GenerateContentConfig(response_logprobs=True, logprobs=2, max_output_tokens=4, temperature=1.0)
    (candidate,) = client(served).models.generate_content(model="policy", contents="hi", config=config).candidates
    result = candidate.logprobs_result
    assert len(result.chosen_candidates) == len(result.top_candidates) >= 1
    assert all(len(each.candidates) == 2 for each in result.top_candidates)


def test_the_async_client_asks_many_at_once(served: str) -> None:
    async def main() -> list[int]:
        models = client(served).aio.models
        config = types.GenerateContentConfig(max_output_tokens=8)
        asked = [models.generate_content(model="policy", contents=str(k), config=config) for k in range(32)]
        return [answer.usage_metadata.candidates_token_count for answer in await asyncio.gather(*asked)]

    assert all(1 <= tokens <= 8 for tokens in asyncio.run(main()))


def test_a_session_is_named_by_the_key(session: OneSession) -> None:
    key = session.root.rpartition("/s/")[2]
    assert client(session.url, key).models.generate_content(model="policy", contents="count").text == "one two three four five"
    session.check_turns("one two three four five")


def test_errors_are_the_sdks_own(served: str) -> None:
    models = client(served).models
    with pytest.raises(errors.ClientError) as caught:
        models.generate_content(model="gemini-pro", contents="x")
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
    with pytest.raises(errors.ClientError, match="maximum context length is"):
        models.generate_content(model="policy", contents="x" * 5000)
    with pytest.raises(errors.ClientError, match=r"contents\.0\.parts\.0 holds inlineData"):
        models.generate_content(model="policy", contents=types.Part.from_bytes(data=b"x", mime_type="image/png"))
    with pytest.raises(errors.ClientError, match="embeds nothing"):
        models.embed_content(model="policy", contents="x")
    with pytest.raises(errors.ClientError, match="there is no session"):
        client(f"{served}/s/mf-x.y").models.generate_content(model="policy", contents="x")
