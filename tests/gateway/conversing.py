"""Templates and tokenizers for the tests of the token tree, and a model that says what it is told."""

from __future__ import annotations

from midflight.gateway.sessions.history import Prompt
from midflight.gateway.sessions.tree import Matcher, TokenTree
from midflight.text import ChatTemplate, Tokenizer
from midflight.text.formats import AssistantMessage, MessageFormat
from midflight.types import Finish, FinishReason, Segment, Turn

WORDED_TEMPLATE = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n' }}{%- endif %}"
    "{{- (m.content or '') | trim }}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- set given = call.function.arguments %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Writes calls and thoughts from their fields, trimmed: not always as the model said them."""


def worded(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the template that words replies itself."""
    return Tokenizer(tokenizer.backend, template=ChatTemplate(WORDED_TEMPLATE, {}), eos_token_ids=tokenizer.eos_token_ids)


def hermes(tokenizer: Tokenizer) -> MessageFormat:
    return MessageFormat(tokenizer, tools="hermes", reasoning="think")


class Model:
    """Says what it is told to, into a tree; the agent sees it parsed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.format = hermes(tokenizer)
        self.tree = TokenTree(tokenizer, matcher=Matcher(tokenizer, self.format))
        self._request = 0

    def says(self, prompt: Prompt, *texts: str) -> AssistantMessage:
        """One request with a choice for each text; the message of the last."""
        self._request += 1
        message = AssistantMessage("")
        for text in texts:
            ids = self.tokenizer.encode(text)
            reply = self.tokenizer.decode(ids, skip_special=True)
            message = self.format.parse(reply, prompt.text, calls=True)
            self.tree.record(prompt, turn(prompt, ids), reply=reply, request=self._request, message=message)
        return message


def turn(prompt: Prompt, ids: tuple[int, ...], *, version: int = 0, sampled: bool = True) -> Turn:
    segments = (Segment(version, version, 0, len(ids)),)
    return Turn(prompt.ids, ids, (-0.5,) * len(ids), segments, Finish(FinishReason.STOP), policy_sampled=sampled)
