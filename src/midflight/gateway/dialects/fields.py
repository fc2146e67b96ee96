"""What the request bodies have in common: fields, their ranges, and how a fault is told to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from midflight.errors import RequestRejected, nearest
from midflight.gateway.call import Asked

MAX_STOPS = 16
"""Stop strings of one request: each token is compared with all of them."""

Tokens = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Body(BaseModel):
    """A request body. Unknown fields are collected, and refused by name where they would change the answer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class SamplingBody(Body):
    """Fields that chat and text completions share. `None` is as good as absent everywhere."""

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, JsonValue] | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def asked(self, max_tokens: int | None) -> Asked:
        return Asked(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=top_k(self.top_k),
            min_p=self.min_p,
            stop=stops(self.stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


B = TypeVar("B", bound=Body)

_HARMLESS = frozenset(
    {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "parallel_tool_calls"}
)
"""Accepted and ignored: they do not change which tokens are sampled."""

_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Known fields with the values that say nothing; any other value would be a promise that is not kept."""


def parse(kind: type[B], body: bytes) -> B:
    """A checked body, or `RequestRejected` naming the field, the value and the remedy."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _rejected(error) from None
    _refuse_unknown(parsed, prefix="")
    return parsed


def _refuse_unknown(body: Body, *, prefix: str) -> None:
    for name, value in (body.model_extra or {}).items():
        if value is None or name in _HARMLESS or value in _NEUTRAL.get(name, ()):
            continue
        param = prefix + name
        if name in _NEUTRAL:
            neutral = " or ".join(repr(v) for v in _NEUTRAL[name])
            raise RequestRejected(f"{param} is not supported here: leave it out, or send {neutral}.", param=param)
        raise RequestRejected(f"unknown field {param[:80]!r}: leave it out.{nearest(name, type(body).model_fields)}", param=param[:80])


def refuse_unknown_within(body: Body, field: str) -> None:
    """The same check for a nested body."""
    _refuse_unknown(body, prefix=f"{field}.")


def stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > MAX_STOPS:
        raise RequestRejected(f"stop holds {len(found)} strings: send {MAX_STOPS} at most.", param="stop")
    if "" in found:
        raise RequestRejected("stop holds an empty string, which would end every answer at once: leave it out.", param="stop")
    return found


def top_k(value: int | None) -> int | None:
    """0 and -1 are ways to say that all tokens stay."""
    return None if value in (None, 0, -1) else value


def _rejected(error: ValidationError) -> RequestRejected:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestRejected(f"the body is not valid JSON ({first['msg']}): send a JSON object.")
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        return RequestRejected(f"the body is not a JSON object ({first['msg']}): send one.")
    if first["type"] == "missing":
        return RequestRejected(f"{place} is missing: send it.", param=place)
    return RequestRejected(f"{place} is {_shown(first['input'])}: {first['msg']}. Correct or leave out this field.", param=place)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
