"""Agents with long conversations before the gateway's own application, in this process and without
a socket: they send the whole conversation again with each turn, as agents do. For `gateway.py`.

The engine is none: each answer is the same sentence, at once. The tokenizer is a byte-level BPE
trained on the pages of this repository, and the template that of ChatML with calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.control import Control
from midflight.gateway.http.http import build_app
from midflight.observe.prometheus import Metrics
from midflight.text.tokenizer import ChatTemplate, Tokenizer
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupKey,
    RolloutKey,
    SamplingParams,
)
from midflight.wire.in_process import ask

PAGES = Path(__file__).parents[2] / "docs"
END = "<|im_end|>"
SPECIALS = (END, "<|im_start|>", "<|endoftext|>")
VOCABULARY = 8192
TEMPLATE = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}"
    "{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""That of ChatML, as models with calls have it."""
TURN_TOKENS = 500
ANSWER_TOKENS = 64
PIECES = 4
"""An answer that is streamed comes in so many chunks."""


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE of the words of the pages."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(page) for page in sorted(PAGES.glob("*.md"))], trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    end = backend.token_to_id(END)
    assert end is not None
    template = ChatTemplate(TEMPLATE, {"eos_token": END})
    return Tokenizer(backend, template=template, eos_token_ids=frozenset({end}))


class SentenceGenerator:
    """Implements `Generator`: the same sentence for every request, at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = " ".join(words_of(random.Random(0), 2 * ANSWER_TOKENS))
        ids = tokenizer.encode(words)[: ANSWER_TOKENS - 1]
        self._ids = (*ids, *sorted(tokenizer.eos_token_ids))
        self._vocab_size = tokenizer.vocab_size
        self.reply = tokenizer.decode(self._ids, skip_special=True)
        self.last: GenerateRequest | None = None
        """The last request."""

    async def generate(
        self, answer: Answer, *, affinity: str, may_abort: bool, told: Callable[[], None]
    ) -> None:
        self.last = answer.request
        size = len(self._ids)
        each = size // PIECES if answer.request.eager else size
        for start in range(0, size, each):
            ids = self._ids[start : start + each]
            ends = start + each >= size
            finish = Finish(FinishReason.STOP, ids[-1]) if ends else None
            answer.accept(Chunk(ids, (-0.5,) * len(ids), 0, 0, finish), vocab_size=self._vocab_size)
            told()

    def forget(self, affinity: str) -> None:
        return None


_WORDS: list[str] = []


def words_of(chance: random.Random, number: int) -> Iterator[str]:
    """Words of the pages, in any order."""
    if not _WORDS:
        for page in sorted(PAGES.glob("*.md")):
            _WORDS.extend(page.read_text(encoding="utf-8").split())
    return itertools.islice(iter(lambda: chance.choice(_WORDS), None), number)


@dataclass
class Dialect:
    """How an agent of one API speaks."""

    path: str
    fields: dict[str, object]
    """What it sends beside the messages."""


CHAT = Dialect("/v1/chat/completions", {"model": "policy"})
MESSAGES = Dialect("/v1/messages", {"model": "policy", "max_tokens": ANSWER_TOKENS})


@dataclass
class Agent:
    """One agent in a session of its own."""

    site: Site
    dialect: Dialect
    stream: bool
    seed: int
    messages: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    num_tokens: int = 0
    """The tokens of its conversation."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        key = RolloutKey(GroupKey(0, self.seed), 0)
        handle = self.site.gateway.open(
            key, sampling=SamplingParams(max_tokens=ANSWER_TOKENS), tracked=True
        )
        self.path = f"/s/{handle.api_key}{self.dialect.path}"

    async def turn(self, num_tokens: int) -> float:
        """Says about so many new tokens, and waits for the answer. Returns the CPU seconds of
        that.
        """
        self.messages.append({"role": "user", "content": self.site.text(self.chance, num_tokens)})
        said: dict[str, object] = {**self.dialect.fields, "messages": self.messages}
        if self.stream:
            said["stream"] = True
        body = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
        began = time.process_time()
        answer = await ask(self.site.app, self.path, body)
        await asyncio.sleep(0)  # what the loop still has to do for the turn
        spent = time.process_time() - began
        assert answer.status == 200, answer.content
        self.messages.append({"role": "assistant", "content": self.site.generator.reply})
        self.num_tokens += num_tokens + ANSWER_TOKENS
        return spent

    async def grow(self, num_tokens: int) -> None:
        """Goes on until its conversation has about so many tokens."""
        while self.num_tokens < num_tokens:
            left = num_tokens - self.num_tokens
            await self.turn(max(1, min(TURN_TOKENS, left) - ANSWER_TOKENS))


class Site:
    """The gateway, its application and its tokenizer."""

    def __init__(self, *, max_context: int = 2**18) -> None:
        self.tokenizer = trained_tokenizer()
        self.generator = SentenceGenerator(self.tokenizer)
        self.gateway = Gateway(
            cast(Generator, self.generator),
            self.tokenizer,
            Metrics().apply,
            model="policy",
            limits=EngineLimits(max_context=max_context, vocab_size=self.tokenizer.vocab_size),
        )
        self.app = build_app(self.gateway, cast(Control, cast(Any, None)))

    def text(self, chance: random.Random, num_tokens: int) -> str:
        """Words that are so many tokens, or one or two more."""
        ids = self.tokenizer.encode(" ".join(words_of(chance, num_tokens)))[:num_tokens]
        return self.tokenizer.decode(ids).replace("\ufffd", "")
