"""The command lines of coding agents, as they come from npm and PyPI, in a scratch folder with a home of their own.

The variables that keep them from calling home are those that their makers document. Whatever else they find of the machine's
environment is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

MODULES = Path(os.environ.get("MIDFLIGHT_CODING_AGENTS", Path(__file__).parents[2] / ".venv-coding-agents" / "node_modules"))
AIDER = Path(os.environ.get("MIDFLIGHT_AIDER", MODULES.parents[1] / ".venv-aider" / "bin" / "aider"))
OPENHANDS = Path(os.environ.get("MIDFLIGHT_OPENHANDS", MODULES.parents[1] / ".venv-openhands" / "bin" / "python"))
AIDER_VERSION = "0.86.2"
SECONDS = 150.0
"""For a whole task: it takes some seconds on a machine that does nothing else."""


@dataclass(frozen=True)
class Ended:
    """What a command line said and did."""

    status: int
    output: str
    errors: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


def binary(pattern: str) -> Path:
    found = sorted(path for path in MODULES.glob(pattern) if path.is_file() and os.access(path, os.X_OK))
    if not found:
        pytest.fail(f"there is no {pattern} in {MODULES}; run `make test-coding-agents`, or set MIDFLIGHT_CODING_AGENTS")
    return found[0]


def surroundings(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", "SHELL": "/bin/bash", **more}


async def run(command: list[str | Path], *, folder: Path, environ: dict[str, str]) -> Ended:
    """Waits for the end; ended after `SECONDS` too."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(), errors.decode())


async def claude_code(
    task: str, *, folder: Path, home: Path, url: str, key: str = "any", words: tuple[str, ...] = (), **environ: str
) -> Ended:
    """`url` without `/v1`, which its SDK adds. The last event says how it ended."""
    models = dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        ),
        "policy",
    )
    silent = dict.fromkeys(
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER", "IS_SANDBOX"),
        "1",
    )
    reach = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "CLAUDE_CONFIG_DIR": str(home / ".claude")}
    command = [
        binary("@anthropic-ai/claude-code-*/claude"),
        "-p",
        task,
        "--output-format",
        "stream-json",
        "--verbose",
        "--dangerously-skip-permissions",
        *words,
    ]
    return await run(command, folder=folder, environ=surroundings(home, **models, **silent, **reach, **environ))


async def codex(task: str, *, folder: Path, home: Path, url: str, key: str = "any", words: tuple[str, ...] = ()) -> Ended:
    """`url` with its `/v1`."""
    provider = f'{{name="midflight",base_url="{url}",wire_api="responses",env_key="MIDFLIGHT_KEY"}}'
    (home / ".codex").mkdir(parents=True, exist_ok=True)
    command = [
        binary("@openai/codex*/vendor/*/bin/codex"),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        *("-c", "model=policy", "-c", "model_provider=midflight", "-c", f"model_providers.midflight={provider}"),
        *("-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false"),
        *words,
        task,
    ]
    return await run(command, folder=folder, environ=surroundings(home, CODEX_HOME=str(home / ".codex"), MIDFLIGHT_KEY=key))


async def qwen_code(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` with its `/v1`. It would ask the model what to remember of a task when that is done: that is switched off."""
    (home / ".qwen").mkdir(exist_ok=True)
    (home / ".qwen" / "settings.json").write_text('{"memory": {"enableManagedAutoMemory": false}}')
    command: list[str | Path] = ["node", MODULES / "@qwen-code" / "qwen-code" / "cli.js", "-p", task, "--yolo"]
    reach = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
    return await run(command, folder=folder, environ=surroundings(home, QWEN_CODE_SUPPRESS_YOLO_WARNING="1", **reach))


async def opencode(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` with its `/v1`."""
    model = {"name": "policy", "limit": {"context": 200_000, "output": 4096}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": url, "apiKey": key}, "models": {"policy": model}}
    names = {"model": "midflight/policy", "small_model": "midflight/policy"}
    config = json.dumps({"provider": {"midflight": provider}, **names, "autoupdate": False, "share": "disabled"})
    silent = dict.fromkeys(("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"), "1")
    command: list[str | Path] = [binary("opencode-linux-*/bin/opencode"), "run", task]
    return await run(command, folder=folder, environ=surroundings(home, OPENCODE_CONFIG_CONTENT=config, **silent))


async def copilot(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` with its `/v1`. It sends a sampling of its own."""
    reach = {"COPILOT_PROVIDER_BASE_URL": url, "COPILOT_PROVIDER_API_KEY": key, "COPILOT_MODEL": "policy"}
    room = {"COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "1000000", "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "4096"}
    silent = {"COPILOT_OFFLINE": "true", "COPILOT_AUTO_UPDATE": "false", "COPILOT_HOME": str(home / ".copilot")}
    command: list[str | Path] = [binary("@github/copilot-linux-*/copilot"), "-p", task, "--allow-all-tools", "--no-color"]
    return await run(command, folder=folder, environ=surroundings(home, **reach, **room, **silent))


async def goose(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` with its `/v1`. Host and path of the address are two settings of its own."""
    parts = urlsplit(url)
    reach = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": "policy",
        "OPENAI_API_KEY": key,
        "OPENAI_HOST": f"{parts.scheme}://{parts.netloc}",
        "OPENAI_BASE_PATH": f"{parts.path.lstrip('/')}/chat/completions",
    }
    silent = {"GOOSE_DISABLE_KEYRING": "1", "GOOSE_TELEMETRY_ENABLED": "false", "GOOSE_MODE": "auto"}
    command: list[str | Path] = [binary("@aaif/goose-binary-linux-*/bin/goose"), "run", "--no-session", "--with-builtin", "developer"]
    return await run([*command, "-t", task], folder=folder, environ=surroundings(home, **reach, **silent))


async def gemini_cli(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` without `/v1`: its SDK adds `/v1beta`. It sends a sampling of its own, unless its settings of the model say otherwise."""
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "tools": {"useRipgrep": False},
    }
    (home / ".gemini").mkdir(exist_ok=True)
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    command: list[str | Path] = ["node", MODULES / "@google" / "gemini-cli" / "bundle" / "gemini.js", "-p", task, "--yolo"]
    reach = {"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": key, "GEMINI_MODEL": "policy"}
    return await run(command, folder=folder, environ=surroundings(home, **reach))


async def openhands(task: str, *, folder: Path, home: Path, url: str, key: str = "any") -> Ended:
    """`url` with its `/v1`. Its command line wants Python 3.12 alone, its SDK that or newer: so its agent runs by the SDK."""
    if not OPENHANDS.exists():
        pytest.skip("OpenHands wants Python 3.12 or newer: `make test-coding-agents` finds one, or OPENHANDS_PYTHON names it")
    reach = {"LLM_MODEL": "openai/policy", "LLM_BASE_URL": url, "LLM_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command: list[str | Path] = [OPENHANDS, Path(__file__).with_name("openhands_task.py"), task]
    return await run(command, folder=folder, environ=surroundings(home, **reach))


async def aider(task: str, *, folder: Path, home: Path, url: str, test: str) -> Ended:
    """`url` with its `/v1`. What `test` says after an edit goes back to the model. Its key says its name, which its SDK's requests do not.
    It asks at temperature 0, of which no token is trained, unless its settings of the model say otherwise."""
    (home / ".aider.model.settings.yml").write_text("- name: openai/policy\n  use_temperature: false\n")
    if (kept := os.environ.get("MIDFLIGHT_RECORD")) is not None:
        (Path(kept) / "versions-aider.json").write_text(json.dumps({"aider": AIDER_VERSION}))
    quiet = [
        f"--{word}" for word in ("no-git", "no-check-update", "no-show-model-warnings", "analytics-disable", "no-pretty", "yes-always")
    ]
    words = ["--model", "openai/policy", "--edit-format", "diff", "--map-tokens", "0", "--auto-test", "--test-cmd", test, "--message", task]
    reach = {"OPENAI_API_BASE": url, "OPENAI_API_KEY": "sk-client-aider", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return await run([AIDER, *quiet, *words, "a.txt"], folder=folder, environ=surroundings(home, **reach))
