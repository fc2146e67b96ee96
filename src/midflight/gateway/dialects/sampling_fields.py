"""The sampling parameters of a request body, under the names of one API."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, create_model
from pydantic.alias_generators import to_snake

from midflight.errors import RequestRejected
from midflight.gateway.dialects.fields import Body
from midflight.gateway.sessions.request import Asked
from midflight.types.generation import (
    LEAST_TEMPERATURE,
    MAX_BIASES,
    MAX_STOPS,
    PARAMETERS,
    Api,
    Parameter,
)

B = TypeVar("B", bound=Body)

TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""A token id as a key of a JSON object."""


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
    """0 and -1 both mean that all tokens are kept."""
    return None if value in (0, -1) else value


def _ids(value: list[int], param: str) -> tuple[int, ...]:
    return tuple(value)


def _biases(named: Mapping[str, float], param: str) -> tuple[tuple[int, float], ...]:
    """The biases by token id, in the order of the ids."""
    return tuple(sorted((int(token_id), bias) for token_id, bias in named.items()))


class _ParameterForms(BaseModel):
    """The JSON form of parameters that clients write in another form than `PARAMETERS`."""

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
"""Functions that turn the client's value of a parameter into ours, if they differ."""


class SamplingFields:
    """The sampling parameters as clients of one API write them. Made once, when a dialect is
    imported.
    """

    def __init__(self, api: Api, *, prefix: str = "") -> None:
        """`prefix` is the place of the fields in the body, for refusals."""
        written = [(p, p.names[api]) for p in PARAMETERS.values() if api in p.names]
        self.names: Mapping[str, str] = {p.name: prefix + name for p, name in written}
        """The client's name for each parameter."""
        self._definitions: dict[str, Any] = {to_snake(name): _definition(p) for p, name in written}
        self._readers = {
            to_snake(name): (p.name, prefix + name, _READERS.get(p.name)) for p, name in written
        }

    def on(self, base: type[B]) -> type[B]:
        """The body with a field for each parameter, bounded by its range. `None` means the same as
        an absent field. Names in camel case need a `CamelBody`.
        """
        return create_model(
            base.__name__, __base__=base, __module__=base.__module__, **self._definitions
        )

    def asked(self, body: BaseModel, **others: object) -> Asked:
        """The parameters that the client set. `others` are parameters that the dialect has read
        itself.
        """
        for sent in body.model_fields_set:
            value = getattr(body, sent) if sent in self._readers else None
            if value is None:
                continue
            name, param, read = self._readers[sent]
            others[name] = value if read is None else read(value, param)
        return Asked(**others)


def _definition(of: Parameter) -> tuple[object, object]:
    """Type and default, as pydantic takes them. A number is bounded by its range; a switch has
    none.
    """
    form = _ParameterForms.model_fields.get(of.name)
    if form is not None:
        return form.annotation, form
    if of.range is None:
        return of.kind | None, None
    least = of.range.least
    above = of.range.above
    return of.kind | None, Field(
        default=None, gt=least if above else None, ge=None if above else least, le=of.range.most
    )
