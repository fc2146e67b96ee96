"""What the request bodies have in common: fields with their ranges, how they are read, and how a
fault is told to the client.

And messages of a conversation as templates read them: one form, whichever dialect they came in.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic_core import from_json, to_json

from midflight.errors import RequestRejected
from midflight.gateway.dialects import policy
from midflight.gateway.dialects.policy import Unread
from midflight.gateway.sessions.request import Asked
from midflight.text import Ending, Message
from midflight.types import Json
from midflight.types.generation import (
    LEAST_TEMPERATURE,
    MAX_BIASES,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    PARAMETERS,
    Api,
    Parameter,
)

MAX_VALUES = 2**20
"""Values in one body, such as the ids of prompts, at most: reading them takes a few tenths of a
second, in which nothing else is done.
"""


MAX_KEYS = 2**17
"""Keys of objects in one body, at most, for the same reason: a key that no field has takes ten
times as long as a value.
"""
_KEY = re.compile(rb'"\s*:')

Tokens = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
PromptTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
"""Alternatives at each place of a prompt."""
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""A token id as a key of a JSON object."""


class Body(BaseModel):
    """A request body, or an object inside one. Its fields are honoured; what becomes of others is
    said here, and else by `policy`.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    harmless: ClassVar[Mapping[str, str]] = {}
    """Names that are passed over also where `gateway.strict` is set, each with the reason."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Names that are passed over, each with the reason."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Names that are refused, each with what to do instead."""
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}
    """The values of other fields that ask for nothing."""
    samples: ClassVar[bool] = False
    """Whether sampling parameters stand here: then a name close to one is refused."""

    def passed_over(self) -> str | None:
        """Why nothing of this object is read; `None` if something is."""
        return None


class RequestBody(Body):
    """A whole body."""

    harmless = policy.HARMLESS
    ignored = policy.IGNORED
    refused = policy.REFUSED
    neutral = policy.NEUTRAL
    samples = True


B = TypeVar("B", bound=Body)


def stops(stop: str | list[str], param: str) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > MAX_STOPS:
        raise RequestRejected(
            f"{param} holds {len(found)} strings: send {MAX_STOPS} at most.", param=param
        )
    if "" in found:
        raise RequestRejected(
            f"{param} holds an empty string, which would end every answer at once: leave it out.",
            param=param,
        )
    return found


def _temperature(value: float, param: str) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        remedy = f"send 0 for the likeliest token always, or {LEAST_TEMPERATURE} and more"
        raise RequestRejected(
            f"{param} is {value}: {remedy}. Correct or leave out this field.", param=param
        )
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
    logit_bias: (
        Annotated[
            dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
        ]
        | None
    ) = None


_READERS: Mapping[str, Callable[..., object]] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "stop": stops,
    "stop_token_ids": _ids,
    "logit_bias": _biases,
}
"""How the value of a parameter is read from what the client wrote, where it is not the same."""


class SamplingFields:
    """The list of sampling parameters as clients of one API write them. Made once, when a dialect
    is imported.
    """

    def __init__(self, api: Api, *, prefix: str = "") -> None:
        """`prefix` is where the fields stand in the body, for refusals."""
        written = [(p, p.names[api]) for p in PARAMETERS.values() if api in p.names]
        self.names: Mapping[str, str] = {p.name: prefix + name for p, name in written}
        """What the client calls each parameter."""
        self._definitions: dict[str, Any] = {name: _definition(p) for p, name in written}
        self._readers = {name: (p.name, prefix + name, _READERS.get(p.name)) for p, name in written}

    def on(self, base: type[B]) -> type[B]:
        """The body with a field for each parameter, bounded by its range. `None` means the same as
        an absent field.
        """
        return create_model(
            base.__name__, __base__=base, __module__=base.__module__, **self._definitions
        )

    def asked(self, body: BaseModel, **others: object) -> Asked:
        """What the client asked for. `others` are parameters that the dialect has read itself."""
        for sent in body.model_fields_set:
            if sent in self._readers and (value := getattr(body, sent)) is not None:
                name, param, read = self._readers[sent]
                others[name] = value if read is None else read(value, param)
        return Asked(**others)


def _definition(of: Parameter) -> tuple[object, object]:
    """Type and default, as pydantic takes them. A number is bounded by its range; a switch has
    none.
    """
    if (form := _Forms.model_fields.get(of.name)) is not None:
        return form.annotation, form
    if of.range is None:
        return of.kind | None, None
    least = of.range.least
    above = of.range.above
    return of.kind | None, Field(
        default=None, gt=least if above else None, ge=None if above else least, le=of.range.most
    )


_TAG = re.compile(r"str|\[key\]|(list|dict)\[.*\]")
"""Parts that pydantic adds to the place of a fault, to say which type of a union was tried, or that
a key is at fault.
"""


def parse(kind: type[B], body: bytes, *, unread: Unread) -> B:
    """A checked body, or `RequestRejected` naming the field, the value and the remedy. What it does
    not read is noted in `unread`.
    """
    _check_values(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        parsed = _with_whole_numbers(kind, body, error, unread=unread)
    _look(parsed, "", unread)
    return parsed


def _with_whole_numbers(kind: type[B], body: bytes, error: ValidationError, *, unread: Unread) -> B:
    """The same body, in which whole numbers that are written as `20.0` are read as such. Raises for
    the fault that is left.
    """
    places = [
        found["loc"]
        for found in error.errors(include_url=False, include_context=False, include_input=False)
        if found["type"] in _WHOLE
    ]
    if not places or error.error_count() > _MAX_WHOLE:
        raise _rejected(error) from None
    try:
        read = from_json(body, allow_inf_nan=False)
        mended = [_mend(read, place) for place in places]
        if not any(mended):
            raise _rejected(error)
        parsed = kind.model_validate_json(to_json(read, inf_nan_mode="constants"))
    except ValidationError as left:
        raise _rejected(left) from None
    except ValueError:
        raise _rejected(error) from None
    unread.refuse(_rejected(error))
    return parsed


_WHOLE = ("int_type", "int_from_float")
"""Kinds of faults of a number that should be whole."""
_MAX_WHOLE = 64
"""Such faults in one body that are mended; there are fewer parameters that are whole numbers."""


def _mend(read: JsonValue, place: Sequence[int | str]) -> bool:
    """Writes the whole number that stands at this place as one; False if it is none. Parts of the
    place that pydantic adds lead nowhere.
    """
    holder: JsonValue = None
    key: int | str = ""
    for part in place:
        if (isinstance(read, dict) and part in read) or (
            isinstance(read, list) and isinstance(part, int) and part < len(read)
        ):
            holder = read
            key = part
            read = cast(JsonValue, read[part])  # type: ignore[index]
    if not isinstance(read, float) or not read.is_integer():
        return False
    cast("dict[int | str, JsonValue]", holder)[key] = int(read)
    return True


def _check_values(body: bytes) -> None:
    """Counts keys, commas and brackets before anything is read. Those inside texts count too; each
    of them is about a token.
    """
    if body.count(b":") > MAX_KEYS and (keys := len(_KEY.findall(body))) > MAX_KEYS:
        raise RequestRejected(
            f"the body holds about {keys} keys of objects: send {MAX_KEYS} at most, in several "
            "requests."
        )
    if (
        len(body) > MAX_VALUES
        and (marks := sum(body.count(mark) for mark in (b",", b"[", b"{"))) > MAX_VALUES
    ):
        raise RequestRejected(
            f"the body holds about {marks} values: send {MAX_VALUES} at most, in several requests."
        )


def _look(body: Body, prefix: str, unread: Unread) -> None:
    """Judges what the body does not read, then looks at the bodies inside it."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and not policy.is_neutral(value, body.neutral.get(name, ())):
            _judge(type(body), prefix + name, name, unread=unread)
    held = {
        name: value
        for name in body.model_fields_set
        if isinstance(value := getattr(body, name), (Body, list))
    }
    for name in (
        held if len(held) < 2 else [name for name in type(body).model_fields if name in held]
    ):
        for place, inner in _bodies(prefix + name, held[name]):
            if (fault := inner.passed_over()) is None:
                _look(inner, f"{place}.", unread)
            else:
                unread.note(
                    f"{place}.{fault}",
                    f"{place} is not supported here: leave it out",
                    known=fault in policy.TOOLS,
                )


def _judge(body: type[Body], param: str, name: str, *, unread: Unread) -> None:
    """Notes a field that is not read, or refuses it by name."""
    shown = param[: policy.MAX_NAME]
    if (remedy := body.refused.get(name)) is not None:
        only = " or ".join(repr(v) for v in body.neutral.get(name, ()))
        raise RequestRejected(
            f"{shown} is not supported here: {remedy}{f', or send {only}' if only else ''}.",
            param=shown,
        )
    if name in body.harmless:
        unread.note(param)
    elif (why := body.ignored.get(name)) is not None:
        unread.note(param, f"{shown} is not supported here ({why}): leave it out")
    elif body.samples and (meant := policy.misspelt(name)) is not None:
        where = (
            f"Did you mean {meant!r}?"
            if meant in body.model_fields
            else "This route does not have it."
        )
        raise RequestRejected(f"unknown field {shown!r}: leave it out. {where}", param=shown)
    else:
        unread.unknown(param)


def _bodies(place: str, value: Body | list[object]) -> list[tuple[str, Body]]:
    """The bodies that a field holds, with their places. Of a list only the first entry is looked
    at, because lists of ids are long.
    """
    if isinstance(value, Body):
        return [(place, value)]
    if value and isinstance(value[0], Body):
        return [(f"{place}.{k}", item) for k, item in enumerate(cast("list[Body]", value))]
    return []


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
    return RequestRejected(
        f"{place} is {_shown(first['input'])}: {message}. Correct or leave out this field.",
        param=place,
    )


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


def ending(messages: Sequence[Message], *, opens: bool) -> Ending:
    """How the prompt ends: `opens` wants the last message continued, which must be text of the
    assistant's.
    """
    if not opens:
        return Ending.TURN
    last = len(messages) - 1
    if messages[last].get("role") != "assistant":
        raise RequestRejected(
            f"messages.{last} is not the assistant's: only such a message can be continued.",
            param=f"messages.{last}",
        )
    if messages[last].get("tool_calls"):
        raise RequestRejected(
            f"messages.{last} ends with a call, which can't be continued: send its result.",
            param=f"messages.{last}",
        )
    return Ending.OPEN


def tool_call(*, call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, *, call_id: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def arguments_text(value: JsonValue, param: str) -> str:
    """The arguments of a call as JSON text. A text that was sent is kept as it is; an empty one
    means no arguments. One that breaks off may have been told so by a stream."""
    if value == "":
        return "{}"
    try:
        text = (
            json.dumps(value, ensure_ascii=False, allow_nan=False)
            if isinstance(value, dict)
            else value
        )
        is_object = isinstance(text, str) and isinstance(
            from_json(text, allow_inf_nan=False, allow_partial=True), dict
        )
    except ValueError:
        text = value
        is_object = False
    if not is_object:
        raise RequestRejected(
            f"{param} is {value!r:.80}: send the JSON text of an object.", param=param
        )
    return str(text)


def text_of(block: Mapping[str, JsonValue], name: str, param: str) -> str:
    """A field that must be a text."""
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestRejected(
            f"{param}.{name} is {value!r:.80}: send a text.", param=f"{param}.{name}"
        )
    return value


def filled(value: JsonValue, param: str) -> str:
    """A text that is not empty, as names and ids must be."""
    if not isinstance(value, str) or not value:
        raise RequestRejected(
            f"{param} is {value!r:.80}: send a text that is not empty.", param=param
        )
    return value


_WANTED: Mapping[type, str] = {str: "a text", bool: "true or false", list: "a list"}


def typed(given: Mapping[str, JsonValue], param: str, kinds: Mapping[str, type]) -> None:
    """Refuses fields of another type than that; one that is `null` is left out."""
    for name in kinds.keys() & given.keys():
        value = given[name]
        if value is not None and not isinstance(value, kinds[name]):
            place = f"{param}.{name}"[:200]
            raise RequestRejected(
                f"{place} is {value!r:.80}: send {_WANTED[kinds[name]]}.", param=place
            )
