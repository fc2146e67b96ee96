"""Every field that OpenAI's SDK can send is read, listed as one that changes nothing, or refused on purpose."""

from __future__ import annotations

from types import ModuleType

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.fields import REMEDIES, Body
from midflight.gateway.dialects.responses_input import ResponsesBody

SENT: list[tuple[type[Body], ModuleType, str, set[str]]] = [
    (ChatBody, chat, "CompletionCreateParams", {"moderation", "prompt_cache_options"}),
    (CompletionBody, completions, "CompletionCreateParams", set()),
    (
        ResponsesBody,
        responses,
        "ResponseCreateParams",
        {"access_programs", "background_options", "context_management", "image", "moderation"},
    ),
]
"""The body, where the SDK lists its fields, and those that are refused as unknown."""


@pytest.mark.parametrize(("body", "module", "name", "refused"), SENT, ids=lambda value: getattr(value, "__name__", None))
def test_a_new_field_of_the_sdk_is_noticed(body: type[Body], module: ModuleType, name: str, refused: set[str]) -> None:
    """Whoever upgrades the SDK decides: read it, list it in `fields.py` (HARMLESS, NEUTRAL, REMEDIES), or name it above."""
    sent = {field for kind in ("Base", "Streaming") for field in getattr(module, name + kind).__annotations__}
    assert len(sent) > 10
    assert sent - set(body.model_fields) - set(body.harmless) - set(body.neutral) - set(REMEDIES) == refused
