"""Options of the chat template, from the fields in which clients set them."""

from collections.abc import Mapping
from typing import Literal

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects.fields import typed
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.text.template_names import RESERVED
from midflight.types import Json

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

FIELDS = frozenset(
    {
        "chat_template_kwargs",
        "reasoning_effort",
        "verbosity",
        "enable_thinking",
        "thinking",
        "reasoning",
    }
)
"""The fields of chats that set options. Without one of them the template has no options."""


def template_options(
    given: Mapping[str, JsonValue] | None,
    effort: str | None,
    *,
    verbosity: str | None = None,
    thinks: bool | None = None,
) -> dict[str, Json]:
    """Options for the chat template. A template that does not read them writes the same text as
    without them. Names that the gateway itself sets are refused.
    """
    options: dict[str, Json] = {} if thinks is None else {"enable_thinking": thinks}
    if verbosity is not None:
        options["verbosity"] = verbosity
    options |= given or {}
    for name in options:
        if name in RESERVED:
            reserved = f"chat_template_kwargs.{name}"
            raise RequestRejected(
                f"{reserved} is set by the gateway: leave it out.", param=reserved
            )
    if effort is not None:
        options["reasoning_effort"] = effort
    return options


def thinks(
    enable_thinking: bool | None,
    thinking: bool | Mapping[str, JsonValue] | None,
    unread: UnreadFields,
) -> bool | None:
    """Returns whether the model should think, from the fields of several vendors. `None` leaves it
    to the template.
    """
    if enable_thinking is not None:
        return enable_thinking
    if not isinstance(thinking, Mapping):
        return thinking
    for name in thinking.keys() - {"type"}:
        unread.note(
            f"thinking.{name}",
            f"thinking.{name} is not supported here: leave it out",
            known=name == "budget_tokens",
        )
    typed(thinking, "thinking", {"type": str})
    kind = thinking.get("type")
    return kind == "enabled" if kind in ("enabled", "disabled") else None


def reasoning(
    given: Mapping[str, JsonValue] | None, unread: UnreadFields
) -> tuple[str | None, bool | None]:
    """The effort, and whether the model should think, from an object that routers to several
    vendors accept.
    """
    if given is None:
        return None, None
    for name in given.keys() - {"effort", "enabled"}:
        unread.note(
            f"reasoning.{name}",
            f"reasoning.{name} is not supported here: leave it out",
            known=name in ("exclude", "max_tokens"),
        )
    effort = given.get("effort")
    enabled = given.get("enabled")
    if effort is not None and not isinstance(effort, str):
        raise RequestRejected(
            f"reasoning.effort is {effort!r:.80}: send a text, such as low or high.",
            param="reasoning.effort",
        )
    if enabled is not None and not isinstance(enabled, bool):
        raise RequestRejected(
            f"reasoning.enabled is {enabled!r:.80}: send true or false.", param="reasoning.enabled"
        )
    return effort, enabled
