"""docs/clients.md, made from the bodies of real clients in tests/corpus: `python tools/clients.py
docs/clients.md`.

Which client in which version was run, over which routes, is read from what was recorded. The rest
of the page is here.
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

An agent changes its base URL and nothing else. With [`midflight serve`](demo.md#what-to-do-with-it):

| client | what it is given |
|---|---|
| Claude Code | `ANTHROPIC_BASE_URL=http://127.0.0.1:8000`, any `ANTHROPIC_API_KEY`, `ANTHROPIC_MODEL=policy` |
| Codex | a provider with `base_url = "http://127.0.0.1:8000/v1"` and `wire_api = "responses"`; `model = "policy"` |
| Qwen Code | `OPENAI_BASE_URL=http://127.0.0.1:8000/v1`, any `OPENAI_API_KEY`, `OPENAI_MODEL=policy` |
| aider | the same as `OPENAI_API_BASE`, and `--model openai/policy` |
| opencode | a provider with `npm = "@ai-sdk/openai-compatible"` and that `baseURL` |
| Copilot CLI | `COPILOT_PROVIDER_BASE_URL=http://127.0.0.1:8000/v1`, any `COPILOT_PROVIDER_API_KEY`, `COPILOT_MODEL=policy`, `COPILOT_OFFLINE=true` |
| goose | `GOOSE_PROVIDER=openai`, `GOOSE_MODEL=policy`, `OPENAI_HOST=http://127.0.0.1:8000`, `OPENAI_BASE_PATH=v1/chat/completions` |
| Gemini CLI | `GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8000`, any `GEMINI_API_KEY`, `GEMINI_MODEL=policy` |
| OpenHands (Python 3.12 or newer) | `LLM(model="openai/policy", base_url="http://127.0.0.1:8000/v1", api_key=...)` |
| others of OpenAI's API | `base_url="http://127.0.0.1:8000/v1"` (litellm: `api_base`, `openai/policy`); [each framework](../tests/clients/test_frameworks.py) |
| `anthropic` | `base_url="http://127.0.0.1:8000"` |
| `google-genai` | `http_options={"base_url": "http://127.0.0.1:8000"}` |
| clients of SGLang and vLLM (slime, AReaL, verl, SkyRL, verifiers, prime-rl) | `http://127.0.0.1:8000` |

Prompts with tools need room: `midflight new-model DIR --set model.max_context=4096`, and coding agents some ten thousand tokens more.

**To take part in training** an agent needs a session, by its base URL `/s/<id>.<secret>/v1` or with that token as API key. An
[environment](environments.md) gets one for each rollout, a worker with each [claim](sessions.md#claims), and a harness
[opens them](sessions.md#sessions-over-http).

**How much of it is trained** stands [in headers](gateway.md#sampling-in-every-dialect). Copilot CLI, griptape and aider send a
temperature of their own, and train nothing until `gateway.sampling = "run"`. So does Gemini CLI with `topP` and `topK`, except on
[the embedded engine](algorithms.md#truncated-sampling). Of every other client here the tests demand a share of 0.95.

## What was run

`make test-clients-all` and `make test-coding-agents` run these, unmodified:

| route | clients |
|---|---|
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
    return INTRODUCTION + "".join(_routes(list(read())))


def _routes(bodies: list[Recorded]) -> Iterator[str]:
    """A row for each route, with the clients that asked it."""
    for route in sorted({_route(one) for one in bodies}):
        clients = {f"{_name(one)} {one.version}" for one in bodies if _route(one) == route}
        yield f"| `{route}` | {', '.join(sorted(clients, key=str.lower))} |\n"


def _route(one: Recorded) -> str:
    """Its path; Google's without the model's name and what follows the method."""
    return one.path.partition("?")[0].replace("/models/policy", "/models/{model}")


def _name(one: Recorded) -> str:
    return NAMES.get(one.client, one.client)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
