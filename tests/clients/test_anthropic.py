"""The `anthropic` SDK, unmodified: messages, streams, tools, counting; sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client(url: str, **options: Any) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_models_are_listed(served: str) -> None:
    assert [model.id for model in client(served).models.list()] == ["policy"]
    assert client(served).models.retrieve("policy").display_name == "policy"


def test_a_message_answers_and_the_same_seed_streams_the_same(served: str) -> None:
    ask: dict[str, Any] = {"model": "policy", "messages": [user("hello")], "max_tokens": 24, "extra_body": {"seed": 5, "temperature": 1.0}}
    whole = client(served).messages.create(**ask, system="Be brief.")
    with client(served).messages.stream(**ask, system=[{"type": "text", "text": "Be brief."}]) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content] == [block.text for block in final.content] == [told]
    assert (whole.stop_reason, whole.usage.input_tokens) == (final.stop_reason, final.usage.input_tokens)
    assert 1 <= final.usage.output_tokens <= 24


def test_a_stop_sequence_ends_the_text_and_is_named(scripted: str) -> None:
    answer = client(scripted).messages.create(model="policy", messages=[user("count")], stop_sequences=["four"], max_tokens=200)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one two three ", "stop_sequence", "four")


def test_a_tool_is_called_and_its_result_is_used(scripted: str) -> None:
    messages = [user("What is the weather in Paris?")]
    first = client(scripted).messages.create(model="policy", messages=messages, tools=[WEATHER], max_tokens=500)
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    ask: dict[str, Any] = {
        "model": "policy",
        "messages": [*messages, {"role": "assistant", "content": first.content}, user([result])],
        "tools": [WEATHER],
    }
    counted = client(scripted).messages.count_tokens(**ask)
    second = client(scripted).messages.create(**ask, max_tokens=500)
    assert second.content[0].text == "The tool said: sunny."
    assert counted.input_tokens == second.usage.input_tokens


def test_parallel_calls_stream_as_blocks(scripted: str) -> None:
    with client(scripted).messages.stream(
        model="policy", messages=[user("weather in Paris and Rome")], tools=[WEATHER], max_tokens=500
    ) as stream:
        message = stream.get_final_message()
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input["city"] for call in calls] == ["Paris", "Rome"]
    assert len({call.id for call in calls}) == 2


def test_the_tool_runner_works_through_a_call(scripted: str) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The name of the city.
        """
        return "sunny" if city == "Paris" else "rainy"

    runner = client(scripted).beta.messages.tool_runner(
        model="policy", messages=[user("What is the weather in Paris?")], tools=[get_weather], max_tokens=500
    )
    assert runner.until_done().content[0].text == "The tool said: sunny."


def test_a_forced_call_and_a_schema_hold_for_random_weights(served: str) -> None:
    paint = {"name": "paint", "input_schema": COLOUR}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
        answer = client(served).messages.create(model="policy", messages=[user("go")], tools=[paint], tool_choice=choice, max_tokens=400)
        assert next(block.input["colour"] for block in answer.content if block.type == "tool_use") in ("red", "green")
    answer = client(served).messages.create(
        model="policy",
        messages=[user("go")],
        max_tokens=400,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}},
    )
    assert json.loads(answer.content[0].text)["colour"] in ("red", "green")


def test_the_async_client_asks_many_at_once(served: str) -> None:
    async def main() -> list[int]:
        async with anthropic.AsyncAnthropic(base_url=served, auth_token="any", max_retries=0) as sdk:
            asked = [sdk.messages.create(model="policy", messages=[user(str(k))], max_tokens=8) for k in range(32)]
            return [answer.usage.output_tokens for answer in await asyncio.gather(*asked)]

    assert all(1 <= tokens <= 8 for tokens in asyncio.run(main()))


def test_a_tool_that_no_model_here_can_call_is_passed_over_and_named(served: str) -> None:
    ask: dict[str, Any] = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    search = {"type": "web_search_20250305", "name": "web_search"}
    answer = client(served).messages.with_raw_response.create(**ask, tools=[search])
    assert answer.headers["x-midflight-ignored"] == "tools.web_search"


def test_errors_are_the_sdks_own(served: str) -> None:
    ask: dict[str, Any] = {"model": "policy", "messages": [user("x")], "max_tokens": 8}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client(served).messages.create(**ask | {"model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is"):
        client(served).messages.create(**ask | {"messages": [user("x" * 5000)]})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0 is a block of type 'image'"):
        client(served).messages.create(**ask | {"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]})
    with pytest.raises(anthropic.NotFoundError, match="there is no session"):
        anthropic.Anthropic(base_url=f"{served}/s/mf-x.y", api_key="any", max_retries=0).messages.create(**ask)
