"""Claude Code, Codex and opencode as agents that are trained: each rollout runs the command line,
as it comes from npm, in a scratch folder.

    python examples/coding_agents.py runs/coding-model
    midflight train configs/coding-agents.toml

The first line makes a tiny model with a BPE tokenizer, trained on the pages of this project, and
room for these agents' prompts, which have some ten thousand tokens. It babbles, so it learns one
thing only: which letters are paid. `AGENTS_MODULES` names the folder of npm's modules (`make
test-coding-agents` makes one).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from openai import AsyncOpenAI

from midflight.environments.agent_program import environment
from midflight.errors import EnvironmentFailed
from midflight.types import Task

MODULES = Path(os.environ.get("AGENTS_MODULES", ".venv-coding-agents/node_modules"))
SECONDS = 240
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|pad|>")
VOWELS = frozenset("aeiouAEIOU")


@environment(name="Claude Code")
async def claude_code(task: Task, client: AsyncOpenAI) -> float:
    """The share of vowels in what it says."""
    url = str(client.base_url).rstrip("/").removesuffix("/v1")
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
    )
    silent = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_AUTOUPDATER",
        "IS_SANDBOX",
    )
    limits = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "48", "CLAUDE_CODE_MAX_RETRIES": "1"}
    environ = {**dict.fromkeys(names, "policy"), **dict.fromkeys(silent, "1"), **limits}
    command = [
        found("@anthropic-ai/claude-code-*/claude"),
        "-p",
        task.text("question"),
        "--max-turns",
        "2",
        "--dangerously-skip-permissions",
    ]
    return vowels(
        await said(command, {**environ, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "unused"})
    )


@environment(name="Codex")
async def codex(task: Task, client: AsyncOpenAI) -> float:
    """The share of vowels in what it says."""
    provider = f'{{name="midflight",base_url="{str(client.base_url).rstrip("/")}",wire_api="responses",env_key="KEY",request_max_retries=1}}'
    options = (
        "model=policy",
        "model_provider=midflight",
        f"model_providers.midflight={provider}",
        "analytics.enabled=false",
    )
    words = [word for option in options for word in ("-c", option)]
    command = [
        found("@openai/codex*/vendor/*/bin/codex"),
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    ]
    return vowels(await said([*command, *words, task.text("question")], {"KEY": "unused"}))


@environment(name="opencode")
async def opencode(task: Task, client: AsyncOpenAI) -> float:
    """The share of vowels in what it says."""
    model = {"name": "policy", "limit": {"context": 32_768, "output": 48}}
    reach = {"baseURL": str(client.base_url).rstrip("/"), "apiKey": "unused"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": reach, "models": {"policy": model}}
    names = {"model": "midflight/policy", "small_model": "midflight/policy"}
    config = json.dumps(
        {"provider": {"midflight": provider}, **names, "autoupdate": False, "share": "disabled"}
    )
    silent = dict.fromkeys(
        (
            "OPENCODE_DISABLE_AUTOUPDATE",
            "OPENCODE_DISABLE_MODELS_FETCH",
            "OPENCODE_DISABLE_LSP_DOWNLOAD",
        ),
        "1",
    )
    command = [found("opencode-linux-*/bin/opencode"), "run", task.text("question")]
    return vowels(await said(command, {**silent, "OPENCODE_CONFIG_CONTENT": config}))


def found(pattern: str) -> str:
    paths = sorted(MODULES.absolute().glob(pattern))
    if not paths:
        raise EnvironmentFailed(
            f"running an agent: there is no {pattern} in {MODULES}. Run `make test-coding-agents`, "
            "or set AGENTS_MODULES."
        )
    return str(paths[0])


async def said(command: list[str], environ: dict[str, str]) -> str:
    """What it prints. Waits for its end, `SECONDS` at most; whatever its exit status: a model that
    babbles may end it with an error.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        home = {
            "HOME": scratch,
            "CLAUDE_CONFIG_DIR": f"{scratch}/.claude",
            "CODEX_HOME": scratch,
            "PATH": os.environ["PATH"],
            "TERM": "dumb",
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env={**home, **environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(SECONDS):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return output.decode(errors="replace")


def vowels(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter in VOWELS for letter in letters) / len(letters) if letters else 0.0


def make_model(folder: Path, *, pages: Path = Path("docs")) -> None:
    """A model of random weights with a BPE of its own. Imports torch."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from midflight.text.byte_tokenizer import CHAT_TEMPLATE

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train([str(path) for path in sorted(pages.rglob("*.md"))], trainer)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    ends: dict[str, Any] = {
        "eos_token_id": backend.token_to_id("<|end|>"),
        "pad_token_id": backend.token_to_id("<|pad|>"),
        "bos_token_id": None,
    }
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        **sizes,
        **ends,
    )
    model = LlamaForCausalLM(config)
    # what all embeddings have in common, the end has twice: so answers end, after twenty tokens or
    # so
    with torch.no_grad():
        table = cast("torch.nn.Embedding", model.get_input_embeddings()).weight
        common = torch.nn.functional.normalize(torch.randn(32), dim=0)
        table += common
        table[ends["eos_token_id"]] = 1.94 * common
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
