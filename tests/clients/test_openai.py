"""The `openai` SDK, whatever major version is installed: chat, completions and responses; sync, async and streamed; tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FLAT = {"type": "function", **WEATHER["function"], "strict": False}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}


def client(url: str, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-any", max_retries=0, **options)


def test_models_are_listed(served: str) -> None:
    assert [model.id for model in client(served).models.list()] == ["policy"]
    assert client(served).models.retrieve("policy").id == "policy"


def test_a_chat_answers_and_the_same_seed_streams_the_same(served: str) -> None:
    ask: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 5}
    whole = client(served).chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    stream = list(client(served).chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole.choices[0].message.content
    assert stream[-1].usage == whole.usage and whole.usage.completion_tokens <= 24
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)


def test_several_choices_and_stop_strings(scripted: str) -> None:
    answer = client(scripted).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "count"}], n=3, stop=["four"], max_tokens=200
    )
    assert [choice.message.content for choice in answer.choices] == ["one two three "] * 3
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_completions_take_texts_token_ids_and_batches(served: str) -> None:
    answer = client(served).completions.create(
        model="policy", prompt=["ab", "cd"], max_tokens=3, n=2, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == 3 for choice in answer.choices)
    ids = client(served).completions.create(model="policy", prompt=[97, 98], max_tokens=3, seed=1, extra_body={"return_token_ids": True})
    assert ids.choices[0].prompt_token_ids == [97, 98]


def test_a_tool_is_called_and_its_result_is_used(scripted: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client(scripted).chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = client(scripted).chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "The tool said: sunny."


def test_parallel_calls_stream_as_deltas(scripted: str) -> None:
    with client(scripted).chat.completions.stream(
        model="policy", messages=[{"role": "user", "content": "weather in Paris and Rome"}], tools=[WEATHER]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Rome"]
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_forced_call_is_well_formed_even_of_random_weights(served: str) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        answer = client(served).chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "go"}],
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=400,
        )
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["colour"] in ("red", "green")


def test_a_json_schema_holds_for_random_weights(served: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    answer = client(served).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "go"}], response_format=wanted, max_tokens=400
    )
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "green")


def test_responses_call_tools_and_go_on(scripted: str) -> None:
    items: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client(scripted).responses.create(model="policy", input=items, tools=[FLAT])
    [call] = [item for item in first.output if item.type == "function_call"]
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client(scripted).responses.create(model="policy", input=items, tools=[FLAT], instructions=None)
    assert second.output_text == "The tool said: sunny."
    assert second.status == "completed" and second.usage.output_tokens > 0


def test_streamed_responses_accumulate_to_the_final_one(scripted: str) -> None:
    with client(scripted).responses.stream(model="policy", input="count", instructions="Be brief.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "one two three four five"


def test_the_async_client_asks_many_at_once(served: str) -> None:
    async def main() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{served}/v1", api_key="sk-any", max_retries=0) as sdk:
            asked = [
                sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(k)}], max_tokens=8) for k in range(32)
            ]
            return [answer.usage.completion_tokens for answer in await asyncio.gather(*asked)]

    assert all(1 <= tokens <= 8 for tokens in asyncio.run(main()))


def test_errors_are_the_sdks_own(served: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client(served).chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client(served).chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 5000}])
    with pytest.raises(openai.BadRequestError, match="modalities is not supported"):
        client(served).chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}], modalities=["audio"])
