"""Every field that the SDKs of OpenAI and Anthropic can send is honoured, passed over with a reason, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypedDict, get_args, get_type_hints

import pytest
from anthropic.types import ContentBlockParam
from anthropic.types import message_count_tokens_params as counting
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from midflight.gateway.dialects.chat import ChatBody
from midflight.gateway.dialects.completions import CompletionBody
from midflight.gateway.dialects.fields import Body
from midflight.gateway.dialects.messages_input import BLOCK_FIELDS, MessagesBody, PromptBody
from midflight.gateway.dialects.responses_input import FIELDS, ResponsesBody
from midflight.gateway.dialects.unread_fields import IGNORED

SENT: list[tuple[type[Body], ModuleType, tuple[str, ...], set[str]]] = [
    (ChatBody, chat, ("CompletionCreateParamsBase", "CompletionCreateParamsStreaming"), set()),
    (CompletionBody, completions, ("CompletionCreateParamsBase", "CompletionCreateParamsStreaming"), set()),
    (ResponsesBody, responses, ("ResponseCreateParamsBase", "ResponseCreateParamsStreaming"), set()),
    (MessagesBody, messages, ("MessageCreateParamsBase", "MessageCreateParamsStreaming"), set()),
    (MessagesBody, beta, ("MessageCreateParamsBase", "MessageCreateParamsStreaming"), set()),
    (PromptBody, counting, ("MessageCountTokensParams",), set()),
]
"""The body, where the SDK lists its fields, and those that are passed over as unknown."""


def inside(hint: Any) -> Iterator[Any]:
    """The classes that a type is made of."""
    if not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from inside(part)


def dictionaries(hint: Any) -> list[Any]:
    return list(dict.fromkeys(part for part in inside(hint) if hasattr(part, "__total__")))


def kind_of(dictionary: Any) -> str | None:
    """The value of its field `type`."""
    return next((each for each in get_args(get_type_hints(dictionary).get("type")) if isinstance(each, str)), None)


def read_by(body: type[Body], dictionary: Any) -> bool:
    """Whether something is read of it: tools of the vendor's are left out whole."""
    kind = kind_of(dictionary)
    return kind is None or "type" not in body.model_fields or body.model_construct(type=kind).passed_over() is None


def unheard_of(body: type[Body], sent: Sequence[Any], place: str = "") -> Iterator[str]:
    """Fields of the SDK's dictionaries that are in no table of the body's, with those of the bodies inside it."""
    fields: dict[str, list[Any]] = {}
    for dictionary in sent:
        for name, hint in get_type_hints(dictionary).items():
            fields.setdefault(name, []).append(hint)
    bodies = {field.alias or name: field.annotation for name, field in body.model_fields.items()}
    yield from (place + name for name in fields.keys() - bodies.keys() - body.harmless.keys() - body.ignored.keys() - body.refused.keys())
    for name in fields.keys() & bodies.keys():
        for inner in [part for part in inside(bodies[name]) if isinstance(part, type) and issubclass(part, Body) and part is not body]:
            found = [each for hint in fields[name] for each in dictionaries(hint) if read_by(inner, each)]
            assert found, (place, name)
            yield from unheard_of(inner, list(dict.fromkeys(found)), f"{place}{name}.")


@pytest.mark.parametrize(("body", "module", "names", "unknown"), SENT, ids=lambda value: getattr(value, "__name__", None))
def test_a_new_field_of_an_sdk_is_noticed_also_inside_others(
    body: type[Body], module: ModuleType, names: tuple[str, ...], unknown: set[str]
) -> None:
    """Whoever upgrades the SDK decides: read it, list it in `unread_fields.py` or its body's tables, or name it above."""
    sent = [getattr(module, name) for name in names]
    assert len({field for each in sent for field in get_type_hints(each)}) > 5
    assert set(unheard_of(body, sent)) == unknown


class Inner(Body):
    a: int


class Outer(Body):
    inner: list[Inner] | None = None


class InnerSent(TypedDict):
    a: int
    b: int


class Sent(TypedDict):
    inner: list[InnerSent]


def test_fields_inside_others_are_looked_at() -> None:
    assert list(unheard_of(Outer, [Sent])) == ["inner.b"]


@pytest.mark.parametrize(("union", "read"), [(ResponseInputItemParam, FIELDS), (ContentBlockParam, BLOCK_FIELDS)], ids=["items", "blocks"])
def test_fields_of_items_and_blocks_are_read_or_passed_over_with_a_reason(union: Any, read: Mapping[str, frozenset[str]]) -> None:
    found = {kind: each for each in get_args(union) if (kind := kind_of(each)) in read}
    assert len(found) >= 6
    for kind, dictionary in found.items():
        assert set(get_type_hints(dictionary)) - read[kind] <= IGNORED.keys(), kind
