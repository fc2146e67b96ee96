"""Tools: functions that the model may call. Their schemas come from signature and docstring. Errors
and missed deadlines become messages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Protocol, cast, get_type_hints

from docstring_parser import Docstring, ParseError, parse
from pydantic import (
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from midflight.allowance import Allowance, Expired
from midflight.entries import load_entry
from midflight.environments.agents import in_thread
from midflight.environments.processor_waits import current_waits
from midflight.environments.reward_functions import gather_or_cancel, place_of
from midflight.errors import ConfigError, EnvironmentFailed, nearest
from midflight.types import Json

MAX_HUNG = 64
"""The number of calls in threads that may still run after their deadline. Each holds memory, or
spins. With more, rollouts fail with an error that names this.
"""
SHAPE = (
    "a tool is `def name(a: int, b: str = '') -> str` with a type for each parameter, async "
    "or plain"
)


class ToolMissed(Exception):
    """A call that gave no answer. The model is told the message."""


class ToolSource(Protocol):
    """One tool, in this process or elsewhere."""

    name: str
    schema: Mapping[str, Json]

    async def call(self, arguments: Mapping[str, Json]) -> object:
        """Waits for the answer. `ToolMissed`, or any error of the tool, becomes the answer. An
        `EnvironmentFailed` fails the rollout.
        """
        ...


@dataclass(slots=True, eq=False)
class CallableTool:
    """A function, or a method of an environment with state."""

    name: str
    schema: Mapping[str, Json]
    function: Callable[..., object]
    arguments: TypeAdapter[Any]
    place: str

    @classmethod
    def of(
        cls, function: Callable[..., object], *, where: str, skip_self: bool = False
    ) -> CallableTool:
        """The tool of a function. Raises `ConfigError` with file, line and function if types are
        missing. With `skip_self` the function is a method that is not bound yet.
        """
        name = getattr(function, "__name__", type(function).__name__)
        place = place_of(function)
        said = f"{where}: {place}"
        adapter = _arguments(function, said, skip_self=skip_self)
        try:
            parameters = cast("dict[str, Json]", _plain(adapter.json_schema()))
        except (PydanticUserError, PydanticSchemaGenerationError) as error:
            raise ConfigError(
                f"{said} has a parameter whose type has no JSON schema ({_line(error)}); {SHAPE}."
            ) from None
        schema: dict[str, Json] = {
            "name": name,
            "description": _described(function).summary,
            "parameters": parameters,
        }
        return cls(name, {"type": "function", "function": schema}, function, adapter, place)

    def bound_to(self, instance: object) -> CallableTool:
        """The same tool as a method of an environment's own object."""
        method = getattr(instance, self.name)
        return CallableTool(self.name, self.schema, method, self.arguments, self.place)

    async def call(self, arguments: Mapping[str, Json]) -> object:
        try:
            given = self.arguments.validate_json(json.dumps(arguments))
        except ValidationError as error:
            problems: list[str] = []
            for problem in error.errors():
                place = ".".join(map(str, problem["loc"])) or "arguments"
                problems.append(f"{place}: {problem['msg']}")
            raise ToolMissed(f"{self.name} was called wrongly: {'; '.join(problems)}") from None
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**given)
        found = await _threads.run(lambda: self.function(**given), self.place)
        return await found if inspect.isawaitable(found) else found


class _Threads:
    """Calls plain functions in threads. A call that outlives its deadline cannot be ended: it is
    counted until it ends by itself.
    """

    def __init__(self) -> None:
        self._hung: dict[object, str] = {}

    async def run(self, work: Callable[[], object], place: str) -> object:
        """Waits for a thread until it ends, or until cancellation, after which its result is
        ignored.
        """
        if len(self._hung) >= MAX_HUNG:
            places = ", ".join(sorted(set(self._hung.values())))
            raise EnvironmentFailed(
                f"calling a tool: {MAX_HUNG} calls of {places} still run though their deadlines "
                "are over; let them end by themselves, or write them as `async def`."
            )
        mark = object()

        def counted() -> object:
            try:
                return work()
            finally:
                done.append(mark)
                self._hung.pop(mark, None)

        done: list[object] = []
        try:
            return await in_thread(counted)
        except asyncio.CancelledError:
            self._hung[mark] = place
            if done:
                self._hung.pop(mark, None)
            raise


_threads = _Threads()


def _arguments(function: Callable[..., object], said: str, *, skip_self: bool) -> TypeAdapter[Any]:
    """Checks the arguments of a call, and converts them to the types that the function names."""
    try:
        types = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{said} has a type that cannot be found: {error}; {SHAPE}.") from None
    described = _described(function).params
    descriptions = {parameter.arg_name: parameter.description for parameter in described}
    parameters = list(inspect.signature(function).parameters.values())
    if skip_self:
        parameters = parameters[1:]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ConfigError(
                f"{said} has {str(parameter)!r}, which a model cannot call by name; {SHAPE}."
            )
        if parameter.name not in types:
            raise ConfigError(
                f"{said} has no type for {parameter.name!r}; write it as `{parameter.name}: str`, "
                f"or whatever it is: {SHAPE}."
            )
        kind = types[parameter.name]
        description = descriptions.get(parameter.name)
        if description:
            kind = Annotated[kind, Field(description=description)]
        if parameter.default is not parameter.empty:
            kind = NotRequired[kind]
        fields[parameter.name] = kind
    make: Any = TypedDict  # its fields are known only now
    shape = make("Arguments", fields)
    shape.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        return TypeAdapter(shape)
    except (PydanticUserError, PydanticSchemaGenerationError) as error:
        raise ConfigError(
            f"{said} has a parameter whose type has no JSON schema ({_line(error)}); {SHAPE}."
        ) from None


@dataclass(frozen=True, slots=True)
class _Docs:
    summary: str
    params: Sequence[Any]


def _described(function: Callable[..., object]) -> _Docs:
    """The docstring of a function, in Google's or NumPy's style or in neither."""
    text = inspect.getdoc(function) or ""
    try:
        found: Docstring = parse(text)
    except ParseError:
        return _Docs(text, ())
    parts = [part for part in (found.short_description, found.long_description) if part]
    return _Docs("\n".join(parts), found.params)


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _plain(schema: Any) -> Any:
    """A schema without titles, which pydantic makes from names and which tell a model nothing."""
    if isinstance(schema, list):
        return [_plain(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            # Here the keys are names, and a name may be "title".
            named = cast("dict[str, Any]", value)
            plain[key] = {name: _plain(each) for name, each in named.items()}
        else:
            plain[key] = _plain(value)
    return plain


def load_tools(entries: Sequence[str]) -> list[CallableTool | type]:
    """Returns the functions as tools, and the classes with state as they are. Raises `ConfigError`
    with the fault and its place.
    """
    found: list[CallableTool | type] = []
    for entry in entries:
        given = load_entry(entry, option="environment.tools", such_as="my_tools:add")
        if inspect.isclass(given):
            found.append(given)
        elif callable(given):
            found.append(CallableTool.of(given, where=f"environment.tools ({entry})"))
        else:
            raise ConfigError(
                f"environment.tools ({entry}) is {given!r:.200}, which cannot be called; {SHAPE}."
            )
    return found


# --- Calls ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """The calls of one tool, or of all, in one rollout."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0

    def metrics(self, name: str) -> dict[str, float]:
        return {
            f"{name}/calls": float(self.calls),
            f"{name}/failures": float(self.failures),
            f"{name}/seconds": float(self.seconds),
        }


class Toolbox:
    """The tools of one rollout, with counts of their calls."""

    def __init__(
        self,
        tools: Sequence[ToolSource],
        *,
        seconds: float,
        slots: asyncio.Semaphore,
        one_by_one: bool,
    ) -> None:
        """`seconds` bound each call, without its wait for a slot and the rollout's waits for a
        processor. With `one_by_one` the calls of one answer run in their order, because they share
        a state.
        """
        self._tools = {tool.name: tool for tool in tools}
        self._seconds = seconds
        self._slots = slots
        self._one_by_one = one_by_one
        self._tallies = {name: Tally() for name in self._tools}
        self._unknown = 0

    @property
    def schemas(self) -> list[Mapping[str, Json]]:
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
        """The messages that answer these calls, in their order. Waits for all of them, each for its
        deadline at most.
        """
        if self._one_by_one:
            return [await self._answer(call) for call in calls]
        return await gather_or_cancel([self._answer(call) for call in calls])

    def metrics(self) -> dict[str, float]:
        total = Tally()
        for tally in self._tallies.values():
            total.calls += tally.calls
            total.failures += tally.failures
            total.seconds += tally.seconds
        total.calls += self._unknown
        total.failures += self._unknown
        found = total.metrics("tools")
        for name, tally in self._tallies.items():
            found |= tally.metrics(f"tools/{name}")
        found["tools/unknown"] = float(self._unknown)
        return found

    async def _answer(self, call: Mapping[str, Any]) -> dict[str, Json]:
        function = cast("Mapping[str, Any]", call.get("function") or {})
        name = str(function.get("name"))
        answer: dict[str, Json] = {
            "role": "tool",
            "tool_call_id": str(call.get("id")),
            "name": name,
        }
        tool = self._tools.get(name)
        if tool is None:
            self._unknown += 1
            answer["content"] = f"error: there is no tool {name!r}.{nearest(name, self._tools)}"
            return answer
        tally = self._tallies[name]
        tally.calls += 1
        async with self._slots:
            began = asyncio.get_running_loop().time()
            try:
                content = await self._called(tool, str(function.get("arguments")))
            except ToolMissed as missed:
                tally.failures += 1
                content = f"error: {missed}"
            finally:
                tally.seconds += asyncio.get_running_loop().time() - began
        answer["content"] = content
        return answer

    async def _called(self, tool: ToolSource, written: str) -> str:
        """Returns the answer as text. Raises `ToolMissed` with the text that the model gets
        instead.
        """
        try:
            arguments = json.loads(written or "{}")
        except ValueError as error:
            raise ToolMissed(f"the arguments of {tool.name} are no JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ToolMissed(f"the arguments of {tool.name} are {written:.80}, expected an object")
        try:
            async with Allowance(self._seconds, excused=current_waits().seconds):
                return as_text(await tool.call(cast("dict[str, Json]", arguments)))
        except (ToolMissed, EnvironmentFailed, asyncio.CancelledError):
            raise
        except Expired:
            raise ToolMissed(f"{tool.name} gave no answer within {self._seconds:g} s") from None
        except TimeoutError as error:
            raise ToolMissed(f"TimeoutError: {error}") from None
        except Exception as error:
            raise ToolMissed(f"{type(error).__name__}: {error}") from None


def as_text(answer: object) -> str:
    """The answer that the model reads: a text as it is, everything else as JSON if possible."""
    if isinstance(answer, str):
        return answer
    try:
        return json.dumps(answer, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(answer)
