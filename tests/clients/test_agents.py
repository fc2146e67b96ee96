"""Agent frameworks, unmodified: each finds the weather by a tool call and says what the tool said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

QUESTION = "What is the weather in Paris?"


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


def test_openai_agents_over_responses_and_over_chat(scripted: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    sdk = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="sk-any")
    for model in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="a",
            instructions="Use the tool.",
            model=model(model="policy", openai_client=sdk),
            tools=[agents.function_tool(weather, name_override="get_weather")],
        )
        assert asyncio.run(agents.Runner.run(agent, QUESTION)).final_output == "The tool said: sunny in Paris."
        assert asyncio.run(_streamed(agents, agent)) == "The tool said: sunny in Paris."


def test_openai_agents_use_tools_and_end_with_a_typed_answer(scripted: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Report(BaseModel):
        city: str
        weather: str

    agents.set_tracing_disabled(True)
    sdk = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="sk-any")
    for model in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="a",
            instructions="Use the tool, answer in JSON.",
            model=model(model="policy", openai_client=sdk),
            tools=[agents.function_tool(weather, name_override="get_weather")],
            output_type=Report,
        )
        assert asyncio.run(agents.Runner.run(agent, QUESTION)).final_output == Report(city="Paris", weather="sunny in Paris")


async def _streamed(agents: Any, agent: Any) -> str:
    run = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in run.stream_events():
        pass
    return str(run.final_output)


def test_litellm_completes_streams_and_calls_tools(scripted: str) -> None:
    litellm = pytest.importorskip("litellm")
    common: dict[str, Any] = {"model": "openai/policy", "api_base": f"{scripted}/v1", "api_key": "sk-any"}
    ask = [{"role": "user", "content": "count"}]
    assert litellm.completion(messages=ask, **common).choices[0].message.content == "one two three four five"
    parts = litellm.completion(messages=ask, stream=True, **common)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two three four five"
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    answer = litellm.completion(messages=[{"role": "user", "content": QUESTION}], tools=[tool], **common)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    anthropic = {**common, "model": "anthropic/policy", "api_base": scripted}
    assert litellm.completion(messages=ask, max_tokens=64, **anthropic).choices[0].message.content == "one two three four five"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x" * 100_000}], **common)


def test_langchain_openai_calls_a_tool_and_streams(scripted: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    for responses in (False, True):
        model = langchain_openai.ChatOpenAI(
            model="policy", base_url=f"{scripted}/v1", api_key="sk-any", max_tokens=200, use_responses_api=responses
        )
        tool = {
            "type": "function",
            "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        }
        said = model.bind_tools([tool]).invoke(QUESTION)
        assert [(call["name"], call["args"]) for call in said.tool_calls] == [("get_weather", {"city": "Paris"})]
        result = messages.ToolMessage(content=weather("Paris"), tool_call_id=said.tool_calls[0]["id"])
        answer = model.bind_tools([tool]).invoke([messages.HumanMessage(QUESTION), said, result])
        assert answer.text == "The tool said: sunny in Paris."
        assert "".join(part.text for part in model.stream("count")) == "one two three four five"


def test_pydantic_ai_runs_tools_and_typed_output(scripted: str, served: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Bit(BaseModel):
        bit: bool

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=f"{scripted}/v1", api_key="sk-any"))
    agent = pydantic_ai.Agent(model, tools=[pydantic_ai.Tool(weather, name="get_weather")], instructions="Use the tool.")
    assert agent.run_sync(QUESTION).output == "The tool said: sunny in Paris."
    random = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=f"{served}/v1", api_key="sk-any"))
    typed = pydantic_ai.Agent(random, output_type=Bit, model_settings={"max_tokens": 500, "parallel_tool_calls": False})
    assert typed.run_sync("yes or no?").output.bit in (True, False)


def test_pydantic_ai_uses_tools_and_ends_with_a_native_typed_answer(scripted: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Report(BaseModel):
        city: str
        weather: str

    model = OpenAIChatModel(
        "policy",
        provider=OpenAIProvider(base_url=f"{scripted}/v1", api_key="sk-any"),
        profile={"supports_json_schema_output": True},
    )
    agent = pydantic_ai.Agent(
        model,
        tools=[pydantic_ai.Tool(weather, name="get_weather")],
        instructions="Answer in JSON.",
        output_type=pydantic_ai.NativeOutput(Report),
    )
    assert agent.run_sync(QUESTION).output == Report(city="Paris", weather="sunny in Paris")


def test_pydantic_ai_over_the_anthropic_dialect(scripted: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    pytest.importorskip("anthropic")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel("policy", provider=AnthropicProvider(base_url=scripted, api_key="sk-any"))
    agent = pydantic_ai.Agent(model, tools=[pydantic_ai.Tool(weather, name="get_weather")])
    assert agent.run_sync(QUESTION).output == "The tool said: sunny in Paris."


def test_smolagents_tool_calling_and_code_agents(scripted: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(model_id="policy", api_base=f"{scripted}/v1", api_key="sk-any")

    @smolagents.tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Name of the city.
        """
        return weather(city)

    caller = smolagents.ToolCallingAgent(tools=[get_weather], model=model, max_steps=3)
    assert "sunny in Paris" in str(caller.run(QUESTION))
    coder = smolagents.CodeAgent(tools=[get_weather], model=model, max_steps=3)
    assert "sunny in Paris" in str(coder.run(QUESTION))
