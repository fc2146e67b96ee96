"""A model that says what a test wrote down: tool calls, code, anything an agent should read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from midflight.errors import RequestRejected
from midflight.testing.script import Script, scripted_tokenizer
from midflight.text import Tokenizer
from midflight.text.byte_tokenizer import END
from midflight.types import GenerateRequest, Version


@dataclass(frozen=True, slots=True)
class Saying:
    """A reply, how many tokens have come since the prompt, and the hash of all of them."""

    reply: tuple[int, ...]
    num_said: int
    hash: int


@dataclass(frozen=True, slots=True)
class Replies:
    """A policy that answers by rule; give it to a `ScriptedEngine` as its script.

    `rule` makes the reply's text of the prompt's text. As a mapping, it holds what a prompt may contain and what is replied to it:
    the key that comes last in the prompt counts, the empty key where there is none; without one the request is refused.

    A reply is a function of the prompt alone, so a resumed request goes on where it was (I5). Its log-probabilities are made up
    from the seed and every id before, so a request that misses, repeats or changes a token has others.
    """

    rule: Callable[[str], str] | Mapping[str, str]
    tokenizer: Tokenizer = field(default_factory=scripted_tokenizer)
    end_id: int = END
    """Said after the reply. Before `min_tokens` a blank is said instead."""

    def start(self, request: GenerateRequest) -> Saying:
        prompt = request.input_ids[: request.num_prompt_tokens]
        reply = self.tokenizer.encode(self._reply(self.tokenizer.decode(prompt)))
        return Saying(reply, request.num_output_tokens, Script().start(request))

    def extend(self, state: Saying, token_id: int) -> Saying:
        return Saying(state.reply, state.num_said + 1, Script().extend(state.hash, token_id))

    def choose(self, state: Saying, version: Version, *, may_end: bool) -> tuple[int, float]:
        """The next token is the same under every version."""
        _, logprob = Script().choose(state.hash, version, may_end=may_end)
        if state.num_said < len(state.reply):
            return state.reply[state.num_said], logprob
        return self.end_id if may_end else self.tokenizer.encode(" ")[0], logprob

    def _reply(self, prompt: str) -> str:
        if not isinstance(self.rule, Mapping):
            return self.rule(prompt)
        found = max(((prompt.rfind(key) if key else 0, len(key), key) for key in self.rule), default=(-1, 0, ""))
        if found[0] < 0:
            raise RequestRejected(f"replying: no reply is written for a prompt that ends with {prompt[-80:]!r}. Add one to the rule.")
        return self.rule[found[2]]
