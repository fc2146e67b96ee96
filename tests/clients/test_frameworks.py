"""Frameworks in a session each: the weather is found by a tool, then said. Every answer is trained in exactly one place.

Each runs in the environment that has it (`requirements-*.txt`), and is skipped in the others.
"""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from conftest import OneSession

QUESTION = "What is the weather in Paris?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FOUND = "The tool said: sunny in Paris."
REPORTED = '<tool_call>\n{"name": "Report", "arguments": {"city": "Paris", "weather": "sunny in Paris"}}\n</tool_call>'
TYPED = '{"city": "Paris", "weather": "sunny in Paris"}'


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


def key(package: str) -> str:
    """An API key that says to the recorder of bodies who sent them. It is told the version too, which is in no body."""
    if (folder := os.environ.get("MIDFLIGHT_RECORD")) is not None:
        (Path(folder) / f"versions-{package}.json").write_text(json.dumps({package: version(package)}))
    return f"sk-client-{package}"


def test_inspect_ai_evaluates_an_agent_over_chats_and_over_messages(session: OneSession, tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="get_weather")
    def weather() -> Any:
        async def execute(city: str) -> str:
            """The weather in a city.

            Args:
                city: Name of the city.
            """
            return get_weather(city)

        return execute

    task = inspect_ai.Task(
        dataset=[Sample(input=QUESTION, target="sunny in Paris")], solver=[use_tools(weather()), generate()], scorer=includes()
    )
    for model, url in (("openai-api/midflight/policy", session.base_url), ("anthropic/policy", session.root)):
        args = {"model_base_url": url, "model_args": {"api_key": key("inspect-ai")}, "max_tokens": 500}
        (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path), **args)
        assert log.status == "success", log.error
        assert log.samples[0].output.completion == FOUND and log.results.scores[0].metrics["accuracy"].value == 1
    session.check_turns(*(CALL, FOUND) * 2)


def test_instructor_reads_calls_and_schemas(session: OneSession) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    weather_class = type("get_weather", (BaseModel,), {"__annotations__": {"city": str}, "__doc__": "The weather in a city."})
    report_class = type("Report", (BaseModel,), {"__annotations__": {"city": str, "weather": str}})
    sdk = openai.OpenAI(base_url=session.base_url, api_key=key("instructor"), max_retries=0)
    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    called, whole = client.chat.completions.create_with_completion(model="policy", messages=ask, response_model=weather_class)
    assert called.city == "Paris"
    given = whole.choices[0].message
    ask += [
        {"content": "", **given.model_dump(exclude_none=True)},
        {"role": "tool", "tool_call_id": given.tool_calls[0].id, "content": get_weather("Paris")},
    ]
    assert client.chat.completions.create(model="policy", messages=ask, response_model=report_class).weather == "sunny in Paris"
    by_schema = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
    ask.append({"role": "system", "content": "Answer in JSON."})
    assert by_schema.chat.completions.create(model="policy", messages=ask, response_model=report_class).city == "Paris"
    session.check_turns(forced=[CALL, REPORTED, TYPED])


def test_autogen_reflects_on_what_a_tool_said(session: OneSession) -> None:
    agentchat = pytest.importorskip("autogen_agentchat.agents")
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}

    async def main() -> str:
        model = OpenAIChatCompletionClient(model="policy", base_url=session.base_url, api_key=key("autogen-agentchat"), model_info=info)
        agent = agentchat.AssistantAgent("a", model_client=model, tools=[get_weather], reflect_on_tool_use=True)
        ended = await agent.run(task=QUESTION)
        await model.close()
        return ended.messages[-1].content

    assert asyncio.run(main()) == FOUND
    session.check_turns(CALL, FOUND)


@pytest.mark.parametrize("dialect", ["openai", "responses", "anthropic"])
def test_langgraph_calls_tools_and_ends_with_a_typed_answer(session: OneSession, dialect: str) -> None:
    """The typed answer is asked for after the last answer of the agent, which for Anthropic's dialect is a prefill."""
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    from pydantic import BaseModel

    class Report(BaseModel):
        """What was found."""

        city: str
        weather: str

    if dialect == "anthropic":
        module = pytest.importorskip("langchain_anthropic")
        model = module.ChatAnthropic(model="policy", base_url=session.root, api_key=key("langgraph"), max_tokens=500)
    else:
        module = pytest.importorskip("langchain_openai")
        model = module.ChatOpenAI(
            model="policy", base_url=session.base_url, api_key=key("langgraph"), use_responses_api=dialect == "responses"
        )
    agent = prebuilt.create_react_agent(model, [get_weather], response_format=Report)
    ended = agent.invoke({"messages": [("user", QUESTION)]})
    assert ended["messages"][-1].text == FOUND
    assert ended["structured_response"] == Report(city="Paris", weather="sunny in Paris")
    session.check_turns(CALL, FOUND, forced=[REPORTED if dialect == "anthropic" else TYPED])


def test_haystack_runs_its_agent(session: OneSession) -> None:
    pytest.importorskip("haystack")
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(api_key=Secret.from_token(key("haystack-ai")), model="policy", api_base_url=session.base_url)
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(get_weather)])
    assert agent.run(messages=[ChatMessage.from_user(QUESTION)])["last_message"].text == FOUND
    session.check_turns(CALL, FOUND)


def test_strands_runs_its_agent(session: OneSession) -> None:
    strands = pytest.importorskip("strands")
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"api_key": key("strands-agents"), "base_url": session.base_url}, model_id="policy")
    agent = strands.Agent(model=model, tools=[strands.tool(get_weather)], callback_handler=None)
    assert str(agent(QUESTION)).strip() == FOUND
    session.check_turns(CALL, FOUND)


def test_llama_index_runs_its_function_agent(session: OneSession) -> None:
    pytest.importorskip("llama_index")
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy",
        api_base=session.base_url,
        api_key=key("llama-index-core"),
        context_window=16_384,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=1.0,
    )

    async def main() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=model, system_prompt="Use the tool.").run(QUESTION))

    assert asyncio.run(main()) == FOUND
    session.check_turns(CALL, FOUND)


def test_google_adk_runs_its_agent_through_litellm(session: OneSession) -> None:
    """With `top_k` too, which it sends as 20.0: that one in no session, for such an answer is no sample of the policy."""
    pytest.importorskip("google.adk")
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    async def said(url: str, **sampling: Any) -> str:
        model = LiteLlm(model="openai/policy", api_base=url, api_key=key("google-adk"))
        config = types.GenerateContentConfig(max_output_tokens=500, **sampling)
        agent = LlmAgent(name="a", model=model, instruction="Use the tool.", tools=[get_weather], generate_content_config=config)
        runner = InMemoryRunner(agent=agent, app_name="weather")
        opened = await runner.session_service.create_session(app_name="weather", user_id="u")
        content = types.Content(role="user", parts=[types.Part(text=QUESTION)])
        events = [event async for event in runner.run_async(user_id="u", session_id=opened.id, new_message=content)]
        return events[-1].content.parts[0].text

    expected = 'The tool said: {"result": "sunny in Paris"}.'
    assert asyncio.run(said(session.base_url)) == asyncio.run(said(f"{session.url}/v1", top_k=20)) == expected
    session.check_turns(CALL, expected)


def test_mini_swe_agent_works_in_a_shell(session: OneSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    pytest.importorskip("minisweagent")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    (tmp_path / "weather.txt").write_text("sunny in Paris\n")
    reach = {"api_base": session.base_url, "api_key": key("mini-swe-agent")}
    model = LitellmModel(model_name="openai/policy", model_kwargs=reach, cost_tracking="ignore_errors")
    agent = DefaultAgent(
        model, LocalEnvironment(cwd=str(tmp_path)), system_template="Use the shell.", instance_template="{{task}}", step_limit=4
    )
    assert agent.run("What does weather.txt say?")["submission"].strip() == "sunny in Paris"
    commands = ("cat weather.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat weather.txt")
    session.check_turns(*(f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{each}"}}}}\n</tool_call>' for each in commands))


def test_dspy_reasons_and_acts_in_its_own_format(session: OneSession) -> None:
    dspy = pytest.importorskip("dspy")
    model = dspy.LM("openai/policy", api_base=session.base_url, api_key=key("dspy"), cache=False, max_tokens=1000, temperature=1.0)
    with dspy.context(lm=model):
        ended = dspy.ReAct("question -> answer", tools=[get_weather])(question=QUESTION)
    assert ended.answer == FOUND and ended.trajectory["observation_0"] == "sunny in Paris"
    parts = [
        {"next_thought": "I ask.", "next_tool_name": "get_weather", "next_tool_args": '{"city": "Paris"}'},
        {"next_thought": "I know.", "next_tool_name": "finish", "next_tool_args": "{}"},
        {"reasoning": "I know.", "answer": FOUND},
    ]
    session.check_turns(
        *("".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in part.items()) + "[[ ## completed ## ]]" for part in parts)
    )


def test_crewai_lets_a_crew_find_out(session: OneSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    crewai = pytest.importorskip("crewai")
    from crewai.tools import tool

    model = crewai.LLM(model="openai/policy", base_url=session.base_url, api_key=key("crewai"))
    agent = crewai.Agent(role="r", goal="g", backstory="b", llm=model, tools=[tool("get_weather")(get_weather)], max_iter=4)
    task = crewai.Task(description=QUESTION, expected_output="the weather", agent=agent)
    assert crewai.Crew(agents=[agent], tasks=[task], tracing=False).kickoff().raw == FOUND
    session.check_turns(CALL, FOUND)


def test_griptape_sends_a_temperature_and_is_trained_where_the_run_samples(session: OneSession, session_by_run: OneSession) -> None:
    """It sends 0.1 unless it is told another one: the head says what that costs, and `gateway.sampling = "run"` costs nothing."""
    pytest.importorskip("griptape")
    from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
    from griptape.structures import Agent
    from griptape.tokenizers import SimpleTokenizer

    for one in (session, session_by_run):
        tokenizer = SimpleTokenizer(characters_per_token=1, max_input_tokens=8192, max_output_tokens=1024)
        driver = OpenAiChatPromptDriver(model="policy", base_url=one.base_url, api_key=key("griptape"), tokenizer=tokenizer)
        agent = Agent(prompt_driver=driver)
        assert str(agent.run("count").output) == "one two three four five"
    session.check_turns(forced=["one two three four five"], by=["temperature"])
    session_by_run.check_turns("one two three four five", replaced={"temperature": 1})
