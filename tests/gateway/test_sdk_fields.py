"""Every field that the SDKs of OpenAI and Anthropic can send is honoured, passed over with a reason, or refused by name."""

from __future__ import annotations

from types import ModuleType

import pytest
from anthropic.types import message_count_tokens_params as counting
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.fields import Body
from midflight.gateway.dialects.messages_input import MessagesBody, PromptBody
from midflight.gateway.dialects.responses_input import ResponsesBody

SENT: list[tuple[type[Body], ModuleType, tuple[str, ...], set[str]]] = [
    (ChatBody, chat, ("CompletionCreateParamsBase", "CompletionCreateParamsStreaming"), set()),
    (CompletionBody, completions, ("CompletionCreateParamsBase", "CompletionCreateParamsStreaming"), set()),
    (ResponsesBody, responses, ("ResponseCreateParamsBase", "ResponseCreateParamsStreaming"), set()),
    (MessagesBody, messages, ("MessageCreateParamsBase", "MessageCreateParamsStreaming"), set()),
    (MessagesBody, beta, ("MessageCreateParamsBase", "MessageCreateParamsStreaming"), set()),
    (PromptBody, counting, ("MessageCountTokensParams",), set()),
]
"""The body, where the SDK lists its fields, and those that are passed over as unknown."""


@pytest.mark.parametrize(("body", "module", "names", "unknown"), SENT, ids=lambda value: getattr(value, "__name__", None))
def test_a_new_field_of_an_sdk_is_noticed(body: type[Body], module: ModuleType, names: tuple[str, ...], unknown: set[str]) -> None:
    """Whoever upgrades the SDK decides: read it, list it in `policy.py`, or name it above."""
    sent = {field for name in names for field in getattr(module, name).__annotations__}
    assert len(sent) > 5
    assert sent - set(body.model_fields) - set(body.harmless) - set(body.ignored) - set(body.refused) == unknown
