"""What the request bodies have in common: fields with their ranges, fields that are not read, and how a fault is told to the client.

And messages of a conversation as templates read them: one form, whichever dialect they came in.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic_core import from_json

from midflight.errors import RequestRejected, nearest
from midflight.gateway.sessions.session import Asked
from midflight.types import Json
from midflight.types.generation import LEAST_TEMPERATURE, MAX_BIASES, MAX_STOPS, MAX_TOP_LOGPROBS, PARAMETERS, Api, Parameter

HARMLESS: Mapping[str, str] = {
    "user": "names the client's own user",
    "safety_identifier": "names the client's own user",
    "metadata": "the client's own labels",
    "store": "nothing is stored beyond the session",
    "prompt_cache_key": "engines find common prefixes by themselves",
    "prompt_cache_retention": "engines find common prefixes by themselves",
    "service_tier": "there is one tier",
    "parallel_tool_calls": "says nothing where no tools are given",
    "prediction": "a hint for speed",
}
"""Fields that are accepted and ignored, each with the reason: they do not change which tokens are sampled."""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "priority": (0,),
}
"""Known fields, each with the values that ask for nothing. Any other value is refused, because the gateway could not do what it asks."""

REMEDIES: Mapping[str, str] = {
    "functions": "send `tools` instead",
    "function_call": "send `tool_choice` instead",
    "echo": "the log-probabilities of a prompt are not known here; score it with the trainer's model",
    "suffix": "write the text to fill in into the prompt, as the model's format for it demands",
    "audio": "answers are text",
    "modalities": "answers are text",
    "web_search_options": "give the model a tool of your own that searches",
    "verbosity": "ask for short or long answers in the messages",
}
"""What to do instead of sending a field that is refused."""


MAX_VALUES = 2**20
"""Values in one body, such as the ids of prompts, at most: reading them takes a few tenths of a second, in which nothing else is done."""


MAX_KEYS = 2**17
"""Keys of objects in one body, at most, for the same reason: a key that no field has takes ten times as long as a value."""
_KEY = re.compile(rb'"\s*:')

Tokens = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""A token id as a key of a JSON object."""


class Body(BaseModel):
    """A request body. Unknown fields are collected, and refused by name where they would change the answer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    harmless: ClassVar[Mapping[str, str]] = HARMLESS
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = NEUTRAL


B = TypeVar("B", bound=Body)


def stops(stop: str | list[str], param: str) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > MAX_STOPS:
        raise RequestRejected(f"{param} holds {len(found)} strings: send {MAX_STOPS} at most.", param=param)
    if "" in found:
        raise RequestRejected(f"{param} holds an empty string, which would end every answer at once: leave it out.", param=param)
    return found


def _temperature(value: float, param: str) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        remedy = f"send 0 for the likeliest token always, or {LEAST_TEMPERATURE} and more"
        raise RequestRejected(f"{param} is {value}: {remedy}. Correct or leave out this field.", param=param)
    return value


def _top_k(value: int, param: str) -> int | None:
    """0 and -1 both mean that all tokens stay."""
    return None if value in (0, -1) else value


def _ids(value: list[int], param: str) -> tuple[int, ...]:
    return tuple(value)


def _biases(named: Mapping[str, float], param: str) -> tuple[tuple[int, float], ...]:
    """By token id, in order of the ids."""
    return tuple(sorted((int(token_id), bias) for token_id, bias in named.items()))


class _Forms(BaseModel):
    """JSON of parameters that clients write in another form than the list's."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: Annotated[dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = None


_READERS: Mapping[str, Callable[..., object]] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "stop": stops,
    "stop_token_ids": _ids,
    "logit_bias": _biases,
}
"""How the value of a parameter is read from what the client wrote, where it is not the same."""


class SamplingFields:
    """The list of sampling parameters as clients of one API write them. Made once, when a dialect is imported."""

    def __init__(self, api: Api, *, prefix: str = "") -> None:
        """`prefix` is where the fields stand in the body, for refusals."""
        written = [(p, p.names[api]) for p in PARAMETERS.values() if api in p.names]
        self.names: Mapping[str, str] = {p.name: prefix + name for p, name in written}
        """What the client calls each parameter."""
        self._definitions: dict[str, Any] = {name: _definition(p) for p, name in written}
        self._readers = {name: (p.name, prefix + name, _READERS.get(p.name)) for p, name in written}

    def on(self, base: type[B]) -> type[B]:
        """The body with a field for each parameter, bounded by its range. `None` means the same as an absent field."""
        return create_model(base.__name__, __base__=base, __module__=base.__module__, **self._definitions)

    def asked(self, body: BaseModel, **others: object) -> Asked:
        """What the client asked for. `others` are parameters that the dialect has read itself."""
        for sent in body.model_fields_set:
            if sent in self._readers and (value := getattr(body, sent)) is not None:
                name, param, read = self._readers[sent]
                others[name] = value if read is None else read(value, param)
        return Asked(**others)


def _definition(of: Parameter) -> tuple[object, object]:
    """Type and default, as pydantic takes them. A number is bounded by its range; a switch has none."""
    if (form := _Forms.model_fields.get(of.name)) is not None:
        return form.annotation, form
    if of.range is None:
        return of.kind | None, None
    least, above = of.range.least, of.range.above
    return of.kind | None, Field(default=None, gt=least if above else None, ge=None if above else least, le=of.range.most)


_TAG = re.compile(r"str|\[key\]|(list|dict)\[.*\]")
"""Parts that pydantic adds to the place of a fault, to say which type of a union was tried, or that a key is at fault."""


def parse(kind: type[B], body: bytes) -> B:
    """A checked body, or `RequestRejected` naming the field, the value and the remedy."""
    _check_values(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _rejected(error) from None
    _refuse_unknown(parsed, prefix="")
    return parsed


def _check_values(body: bytes) -> None:
    """Counts keys, commas and brackets before anything is read. Those inside texts count too; each of them is about a token."""
    if body.count(b":") > MAX_KEYS and (keys := len(_KEY.findall(body))) > MAX_KEYS:
        raise RequestRejected(f"the body holds about {keys} keys of objects: send {MAX_KEYS} at most, in several requests.")
    if len(body) > MAX_VALUES and (marks := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestRejected(f"the body holds about {marks} values: send {MAX_VALUES} at most, in several requests.")


def _refuse_unknown(body: Body, *, prefix: str) -> None:
    """Looks at the body, then at the bodies inside it."""
    for name, value in (body.model_extra or {}).items():
        if value is None or name in body.harmless or _is_neutral(value, body.neutral.get(name, ())):
            continue
        param = (prefix + name)[:80]
        neutral = " or ".join(repr(v) for v in body.neutral.get(name, ()))
        remedy = REMEDIES.get(name) or (neutral and f"leave it out, or send {neutral}")
        if remedy:
            raise RequestRejected(f"{param} is not supported here: {remedy}.", param=param)
        raise RequestRejected(f"unknown field {param!r}: leave it out.{nearest(name, type(body).model_fields)}", param=param)
    held = {name: value for name in body.model_fields_set if isinstance(value := getattr(body, name), (Body, list))}
    for name in held if len(held) < 2 else [name for name in type(body).model_fields if name in held]:
        for place, inner in _bodies(prefix + name, held[name]):
            _refuse_unknown(inner, prefix=f"{place}.")


def _bodies(place: str, value: Body | list[object]) -> list[tuple[str, Body]]:
    """The bodies that a field holds, with their places. Of a list only the first entry is looked at, because lists of ids are long."""
    if isinstance(value, Body):
        return [(place, value)]
    if value and isinstance(value[0], Body):
        return [(f"{place}.{k}", item) for k, item in enumerate(cast("list[Body]", value))]
    return []


def _is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    """Whether a value asks for nothing. `True` is not the same as 1 here."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)


def _rejected(error: ValidationError) -> RequestRejected:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestRejected(f"the body is not valid JSON ({first['msg']}): send a JSON object.")
    place = ".".join(str(part) for part in first["loc"] if not _TAG.fullmatch(str(part)))[:200]
    if not place:
        return RequestRejected(f"the body is not a JSON object ({first['msg']}): send one.")
    if first["type"] == "missing":
        return RequestRejected(f"{place} is missing: send it.", param=place)
    message = first["msg"].removeprefix("Value error, ")
    return RequestRejected(f"{place} is {_shown(first['input'])}: {message}. Correct or leave out this field.", param=place)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def assistant(content: str, *, reasoning: str = "", calls: Sequence[Json] = ()) -> dict[str, Json]:
    """A message of the model. What it did not say has no field."""
    message: dict[str, Json] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(*, call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, *, call_id: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def arguments_text(value: JsonValue, param: str) -> str:
    """The arguments of a call as JSON text. A text that was sent is kept as it is; an empty one means no arguments."""
    if value == "":
        return "{}"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else value
        is_object = isinstance(text, str) and isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        text, is_object = value, False
    if not is_object:
        raise RequestRejected(f"{param} is {value!r:.80}: send the JSON text of an object.", param=param)
    return str(text)


def text_of(block: Mapping[str, JsonValue], name: str, param: str) -> str:
    """A field that must be a text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestRejected(f"{param}.{name} is {value!r:.80}: send a text.", param=f"{param}.{name}")
    return value


def filled(value: JsonValue, param: str) -> str:
    """A text that is not empty, as names and ids must be."""
    if not isinstance(value, str) or not value:
        raise RequestRejected(f"{param} is {value!r:.80}: send a text that is not empty.", param=param)
    return value
