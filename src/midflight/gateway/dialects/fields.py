"""The base of all request bodies: their fields with ranges, how they are read, and the refusals of
faults.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import from_json, to_json

from midflight.errors import RequestRejected
from midflight.gateway.dialects import unread_fields
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.types.generation import (
    MAX_TOP_LOGPROBS,
)

MAX_VALUES = 2**20
"""The most values in one body, such as the ids of prompts. Reading them takes a few tenths of a
second, and the event loop does nothing else in that time.
"""


MAX_KEYS = 2**17
"""The most keys of objects in one body, for the same reason. A key that belongs to no field takes
ten times as long as a value.
"""
_KEY = re.compile(rb'"\s*:')

Tokens = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
PromptTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
"""The number of alternatives at each place of a prompt."""


class Body(BaseModel):
    """A request body, or an object inside one. Its fields are honoured. The class variables say
    what happens to other fields, and `unread_fields` says it for the rest.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    harmless: ClassVar[Mapping[str, str]] = {}
    """Names that are ignored even if `gateway.strict` is set, each with the reason."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Names that are ignored, each with the reason."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Names that are refused, each with what to do instead."""
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}
    """The values of other fields that ask for nothing."""
    samples: ClassVar[bool] = False
    """True if this object holds sampling parameters. Then a name that is close to one
    is refused.
    """

    def passed_over(self) -> str | None:
        """Returns why this object is ignored as a whole, or `None` if it is read."""
        return None

    @classmethod
    def written(cls, name: str) -> str:
        """A name as the tables of this body write it."""
        return name


class CamelBody(Body):
    """A body whose names are in camel case. Google's clients write the same names in snake case
    too.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    @classmethod
    def written(cls, name: str) -> str:
        return to_camel(name)


class RequestBody(Body):
    """The whole body of a request."""

    harmless = unread_fields.HARMLESS
    ignored = unread_fields.IGNORED
    refused = unread_fields.REFUSED
    neutral = unread_fields.NEUTRAL
    samples = True


B = TypeVar("B", bound=Body)


_TAG = re.compile(r"str|\[key\]|(list|dict)\[.*\]")
"""Parts that pydantic adds to the place of a fault. They say which type of a union was tried, or
that a key is at fault.
"""


def parse(kind: type[B], body: bytes, *, unread: UnreadFields) -> B:
    """Parses and checks a body. Raises `RequestRejected` that names the field, the value and the
    remedy. Fields that are not read are noted in `unread`.
    """
    _check_values(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        parsed = _with_whole_numbers(kind, body, error, unread=unread)
    _look(parsed, "", unread)
    return parsed


def _with_whole_numbers(
    kind: type[B], body: bytes, error: ValidationError, *, unread: UnreadFields
) -> B:
    """Parses a body again, with whole numbers that are written as `20.0` read as integers. Raises
    for the fault that is left.
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
"""Pydantic's types of faults for a number that should be whole."""
_MAX_WHOLE = 64
"""The most such faults in one body that are mended. There are fewer integer parameters than
this.
"""


def _mend(read: JsonValue, place: Sequence[int | str]) -> bool:
    """Turns the float at this place into an integer. Returns False if it is no whole number. Parts
    of the place that pydantic adds are skipped.
    """
    holder: JsonValue = None
    key: int | str = ""
    for part in place:
        in_object = isinstance(read, dict) and part in read
        in_list = isinstance(read, list) and isinstance(part, int) and part < len(read)
        if in_object or in_list:
            holder = read
            key = part
            read = cast(JsonValue, read[part])  # type: ignore[index]
    if not isinstance(read, float) or not read.is_integer():
        return False
    cast("dict[int | str, JsonValue]", holder)[key] = int(read)
    return True


def _check_values(body: bytes) -> None:
    """Refuses a body with too many values or keys. It counts keys, commas and brackets before
    anything is parsed. Characters inside texts count too; each of them is about one token.
    """
    keys = len(_KEY.findall(body)) if body.count(b":") > MAX_KEYS else 0
    if keys > MAX_KEYS:
        raise RequestRejected(
            f"the body holds about {keys} keys of objects: send {MAX_KEYS} at most, in several "
            "requests."
        )
    if len(body) <= MAX_VALUES:
        return
    marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    if marks > MAX_VALUES:
        raise RequestRejected(
            f"the body holds about {marks} values: send {MAX_VALUES} at most, in several requests."
        )


def _look(body: Body, prefix: str, unread: UnreadFields) -> None:
    """Judges the fields that the body does not read, then looks at the bodies inside it."""
    for sent, value in (body.model_extra or {}).items():
        name = body.written(sent)
        if value is not None and not unread_fields.is_neutral(value, body.neutral.get(name, ())):
            _judge(type(body), prefix + sent, name, unread=unread)
    held: dict[str, Body | list[object]] = {}
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, (Body, list)):
            held[name] = cast("Body | list[object]", value)
    names = list(held)
    if len(names) > 1:  # the set of fields has no order
        names = [name for name in type(body).model_fields if name in held]
    for name in names:
        for place, inner in _bodies(prefix + body.written(name), held[name]):
            fault = inner.passed_over()
            if fault is None:
                _look(inner, f"{place}.", unread)
            else:
                unread.note(
                    f"{place}.{fault}",
                    f"{place} is not supported here: leave it out",
                    known=fault in unread_fields.TOOLS,
                )


def _judge(body: type[Body], param: str, name: str, *, unread: UnreadFields) -> None:
    """Notes a field that is not read, or refuses it by name."""
    shown = param[: unread_fields.MAX_NAME]
    remedy = body.refused.get(name)
    if remedy is not None:
        neutral = " or ".join(repr(value) for value in body.neutral.get(name, ()))
        if neutral:
            remedy = f"{remedy}, or send {neutral}"
        raise RequestRejected(f"{shown} is not supported here: {remedy}.", param=shown)
    if name in body.harmless:
        unread.note(param)
        return
    why = body.ignored.get(name)
    if why is not None:
        unread.note(param, f"{shown} is not supported here ({why}): leave it out")
        return
    meant = unread_fields.misspelt(name) if body.samples else None
    if meant is None:
        unread.unknown(param)
        return
    where = "This route does not have it."
    if meant in body.model_fields:
        where = f"Did you mean {body.written(meant)!r}?"
    raise RequestRejected(f"unknown field {shown!r}: leave it out. {where}", param=shown)


def _bodies(place: str, value: Body | list[object]) -> list[tuple[str, Body]]:
    """The bodies that a field holds, with their places. The first entry decides whether a list
    holds bodies, because lists of ids are long.
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
    """Refuses fields that have another type than `kinds` says. A field that is `null` counts as
    absent.
    """
    for name in kinds.keys() & given.keys():
        value = given[name]
        if value is not None and not isinstance(value, kinds[name]):
            place = f"{param}.{name}"[:200]
            raise RequestRejected(
                f"{place} is {value!r:.80}: send {_WANTED[kinds[name]]}.", param=place
            )
