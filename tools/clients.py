"""docs/clients.md, made from the bodies of real clients in tests/corpus: `python tools/clients.py
docs/clients.md`.

Which client in which version was run, over which routes, what of the dialect it used, and which of
its fields were without effect is read from what was recorded. The rest of the page is here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.corpus.recorded import Recorded, read

INTRODUCTION = """# Clients

*A page to look things up in.*

Made by `python tools/clients.py docs/clients.md`; edit the sentences there.

An agent changes its base URL and nothing else. Pauses, new weights and dead engines are invisible to it.

While [`midflight serve`](demo.md#what-to-do-with-it) runs:

| client | what it is given |
|---|---|
| Claude Code | `ANTHROPIC_BASE_URL=http://127.0.0.1:8000`, `ANTHROPIC_API_KEY` of any value, `ANTHROPIC_MODEL=policy` |
| Codex | a provider with `base_url = "http://127.0.0.1:8000/v1"` and `wire_api = "responses"`, `model = "policy"` |
| Qwen Code; aider | `OPENAI_BASE_URL` (aider: `OPENAI_API_BASE`) and any `OPENAI_API_KEY`; `OPENAI_MODEL=policy` (aider: `--model openai/policy`) |
| opencode | a provider with `npm = "@ai-sdk/openai-compatible"` and that address as its `baseURL` |
| Copilot CLI | `COPILOT_PROVIDER_BASE_URL` (that address), `COPILOT_PROVIDER_API_KEY`, `COPILOT_MODEL=policy`, `COPILOT_OFFLINE=true` |
| goose | `GOOSE_PROVIDER=openai`, `GOOSE_MODEL=policy`, `OPENAI_HOST=http://127.0.0.1:8000`, `OPENAI_BASE_PATH=v1/chat/completions` |
| Gemini CLI | `GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8000`, any `GEMINI_API_KEY`, `GEMINI_MODEL=policy` |
| OpenHands | its SDK with Python 3.12 or newer: `LLM(model="openai/policy", base_url="http://127.0.0.1:8000/v1", api_key=...)` |
| `openai`: chats, completions, responses | `base_url="http://127.0.0.1:8000/v1"` |
| `anthropic` | `base_url="http://127.0.0.1:8000"`: its SDK adds the `/v1` |
| `google-genai` | `http_options={"base_url": "http://127.0.0.1:8000"}`: its SDK adds the `/v1beta`, or `/v1` |
| the AI SDK | `createOpenAI({ baseURL: "http://127.0.0.1:8000/v1" })` |
| `openai-agents` | `OpenAIResponsesModel(...)` or `OpenAIChatCompletionsModel(...)` with `openai_client=AsyncOpenAI(base_url=...)` |
| `langchain-openai` | `ChatOpenAI(base_url=...)`, with `use_responses_api` or without |
| `pydantic-ai` | `OpenAIProvider(base_url=...)`, or `AnthropicProvider(base_url=...)` without `/v1` |
| `smolagents`, `litellm` | `api_base=...`; litellm's model is then `openai/policy` |
| frameworks below | as for any server of OpenAI's API: [test_frameworks.py](../tests/clients/test_frameworks.py) has each |
| SGLang's clients: its own runtime endpoint, slime, AReaL, verl, SkyRL | `http://127.0.0.1:8000`, as a server's |
| vLLM's clients: tokens in and out, as verifiers and prime-rl | the same |

Prompts with tools need room: `midflight new-model DIR --set model.max_context=4096`, and coding agents some ten thousand tokens more.
[examples/agent_openai.py](../examples/agent_openai.py) is an agent that streams.

**To take part in training** an agent needs a session: its base URL is then `/s/<id>.<secret>/v1`, or that token is its API key. An
[environment](environments.md) gets one for each rollout, a worker with each [claim](sessions.md#claims), and a harness
[opens them](sessions.md#sessions-over-http).

**How much of it is trained** stands [in headers of each answer](gateway.md#sampling-in-every-dialect). Copilot CLI, griptape and aider send a
temperature of their own, and train nothing until they are told not to, or until `gateway.sampling = "run"`. So does Gemini CLI with its
`topP` and `topK`, but for the embedded engine, which trains [truncated sampling](algorithms.md#truncated-sampling). For every other client here the tests demand
a share of 0.95 at least. `midflight.testing.commands.ScriptedCommands` stands in for a model when you try a harness
([test_any_agent.py](../tests/coding_agents/test_any_agent.py)).

## What was run

Unmodified clients, run by `make test-clients-all` and `make test-coding-agents`. [tests/corpus](../tests/corpus) has a body of each kind that
they sent.

| client | version | route | what it used | without effect |
|---|---|---|---|---|
"""
NAMES = {
    "claude-cli": "Claude Code",
    "codex_exec": "Codex",
    "GeminiCLI-tui": "Gemini CLI",
    "google-genai-sdk": "google-genai",
    "QwenCode": "Qwen Code",
    "ai-sdk": "AI SDK",
    "OpenAI-JS": "openai (npm)",
    "Anthropic-JS": "anthropic (npm)",
    "OpenAI-Python": "openai",
    "AsyncOpenAI-Python": "openai, async",
    "Anthropic-Python": "anthropic",
    "AsyncAnthropic-Python": "anthropic, async",
}
"""What clients are called that name themselves otherwise."""


def page() -> str:
    """The page, as Markdown."""
    return INTRODUCTION + "".join(_rows(list(read())))


def _rows(bodies: list[Recorded]) -> Iterator[str]:
    """One for each client and route."""
    routes = dict.fromkeys((one.client, one.version, one.path) for one in bodies)
    for client, version, path in sorted(
        routes, key=lambda route: (NAMES.get(route[0], route[0]).lower(), route)
    ):
        these = [
            one for one in bodies if (one.client, one.version, one.path) == (client, version, path)
        ]
        used = dict.fromkeys(word for one in these for word in one.features.split(", "))
        ignored = dict.fromkeys(
            f"`{word}`" for one in these for word in one.ignored.split(", ") if word
        )
        yield (
            f"| {NAMES.get(client, client)} | {version} | `{path}` | {', '.join(used)} | "
            f"{', '.join(ignored)} |\n"
        )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
