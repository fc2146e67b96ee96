"""docs/methods.md, made from the SDKs of OpenAI and Anthropic and from the gateway's routes: `python tools/methods.py docs/methods.md`.

Each method of both SDKs is found by looking at the classes of their clients. Which of them has a route here is asked of the gateway's
application; the others have a sentence in the table of refusals.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import openai
from starlette.routing import Match, Route

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.gateway.offered import RecordingControl, ScriptedGenerator, make_gateway

from midflight.gateway.http.http import build_app
from midflight.gateway.http.not_offered import NOT_OFFERED, refusal, row_of

CLIENTS: dict[str, tuple[type, str]] = {
    "openai": (openai.OpenAI, "/v1"),
    "anthropic": (anthropic.Anthropic, ""),
}
"""The client of each SDK, and what its base URL adds to the paths."""
SOCKET = "WebSocket"
LOCAL = "local"
"""A method that asks no server."""

_SENT = re.compile(
    r'self\._(get|post|put|patch|delete|get_api_list)\s*[,(]\s*(?:path_template\(\s*)?f?"([^"]+)"'
)
_OTHER_VERB = re.compile(r'method="(\w+)"')
_SAME_RESOURCE = re.compile(r"self\.([a-z]\w+)\(")
_IMPORTED = re.compile(r"from\s+([.\w]+)\s+import\s+(\w+)")

WORDS: dict[tuple[str, str], str] = {
    ("POST", "/v1/chat/completions"): "a chat, whole or streamed",
    ("POST", "/v1/completions"): "a completion, whole or streamed",
    ("POST", "/v1/responses"): "a response, whole or streamed; its session keeps it",
    (
        "GET",
        "/v1/responses/{}",
    ): "a kept response; with `stream` in the events that it came in, after `starting_after`",
    ("DELETE", "/v1/responses/{}"): "a kept response is forgotten",
    ("GET", "/v1/responses/{}/input_items"): "what the response answered, by pages",
    ("POST", "/v1/responses/input_tokens"): "how many tokens a response would read",
    (
        "POST",
        "/v1/responses/{}/cancel",
    ): "**refused** by 400: a kept response is complete, and none is made in the background",
    ("POST", "/v1/conversations"): "a conversation begins",
    ("GET", "/v1/conversations/{}"): "a conversation",
    ("POST", "/v1/conversations/{}"): "its `metadata` is replaced",
    ("DELETE", "/v1/conversations/{}"): "it is forgotten; its responses stay",
    ("GET", "/v1/conversations/{}/items"): "its items, by pages",
    ("POST", "/v1/conversations/{}/items"): "items are added to it",
    ("GET", "/v1/conversations/{}/items/{}"): "one item",
    ("DELETE", "/v1/conversations/{}/items/{}"): "one item is removed",
    ("GET", "/v1/models"): "the model that is served",
    ("GET", "/v1/models/{}"): "the same, by its name",
    ("POST", "/v1/messages"): "a message, whole or streamed",
    ("POST", "/v1/messages/count_tokens"): "how many tokens a message would read",
}
"""What is answered, by verb and path."""

INTRODUCTION = """# Methods of the SDKs

*A page to look things up in.*

Made by `python tools/methods.py docs/methods.md` from `openai` {openai} and `anthropic` {anthropic}; edit the sentences there.

Every method of both SDKs is answered, or refused by status 404 (`not_offered`) with what to use instead. A `beta` method is answered as the one
without `beta`.

## Answered

| route | what comes | methods |
|---|---|---|
"""
REFUSED = """
## Refused

All methods below a resource, but for those that are answered:

| path | use instead | resources |
|---|---|---|
"""
LOCALLY = """
## Without a server

These work on what the client has: {names}.
"""


@dataclass(frozen=True)
class Method:
    """A method of an SDK, and the request that it sends."""

    sdk: str
    name: str
    verb: str
    path: str
    """Parameters are `{}`."""

    @property
    def resource(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def example(self) -> str:
        return self.path.replace("{}", "x")

    @property
    def beginning(self) -> str:
        """Its row in the table of refusals."""
        return row_of(self.example) or ""


@cache
def methods() -> tuple[Method, ...]:
    """All methods of both SDKs, in their order."""
    found: list[Method] = []
    for sdk, (client, prefix) in CLIENTS.items():
        for resource, path in _resources(client):
            found += [_method(sdk, prefix, resource, path, name) for name in _names(resource)]
    return tuple(found)


def _resources(cls: type, path: str = "") -> Iterator[tuple[type, str]]:
    """The classes of a client that have methods, with the names by which they are reached."""
    for name in dir(cls):
        if name.startswith(("_", "with_raw_response", "with_streaming_response")):
            continue
        attribute = inspect.getattr_static(cls, name)
        made = getattr(attribute, "func", None) or getattr(attribute, "fget", None)
        found = None if made is None else _class_of(made)
        if found is not None:
            yield found, f"{path}{name}"
            yield from _resources(found, f"{path}{name}.")


def _class_of(made: Any) -> type | None:
    """The class of the resource that a property makes."""
    named = made.__annotations__.get("return")
    module = sys.modules[made.__module__]
    found = named
    if isinstance(named, str):
        imported = _IMPORTED.search(inspect.getsource(made))
        if imported is not None:
            found = getattr(importlib.import_module(imported[1], module.__package__), imported[2])
        else:
            found = getattr(module, named, None)
    return found if inspect.isclass(found) and ".resources" in found.__module__ else None


def _names(resource: type) -> list[str]:
    return [
        name
        for name in dir(resource)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(resource, name))
    ]


def _method(sdk: str, prefix: str, resource: type, path: str, name: str) -> Method:
    named = f"{path}.{name}"
    if name == "connect":
        return Method(
            sdk, named, SOCKET, f"{prefix}/{path.removeprefix('beta.').replace('.', '/')}"
        )
    verb, sent = _request_of(resource, name)
    if verb == LOCAL:
        return Method(sdk, named, LOCAL, "")
    where = re.sub(r"\{[^}]*\}", "{}", sent.partition("?")[0])
    return Method(sdk, named, verb, prefix + where)


def _request_of(resource: type, name: str, seen: tuple[str, ...] = ()) -> tuple[str, str]:
    """Verb and path of what a method sends. Helpers send what another method of their resource does."""
    source = inspect.getsource(getattr(resource, name))
    sent = _SENT.search(source)
    if sent is not None:
        verb, path = sent.groups()
        other = _OTHER_VERB.search(source)
        if verb == "get_api_list":
            verb = other[1] if other else "get"
        return verb.upper(), path
    for inner in _SAME_RESOURCE.findall(source):
        if inner not in (*seen, name) and hasattr(resource, inner):
            found = _request_of(resource, inner, (*seen, name))
            if found[0] != LOCAL:
                return found
    return _of_resource(resource, name) if name not in _WITHOUT_SERVER else (LOCAL, "")


_WITHOUT_SERVER = ("unwrap", "parse_unverified", "verify_signature", "thread")


def _of_resource(resource: type, name: str) -> tuple[str, str]:
    """A helper whose request is made elsewhere: it begins with what its resource creates, or lists."""
    for other in ("create", "list", "retrieve"):
        if other != name and hasattr(resource, other):
            return _request_of(resource, other, (name,))
    return LOCAL, ""


@cache
def _routes() -> Sequence[Route]:
    app: Any = build_app(make_gateway(ScriptedGenerator()), RecordingControl(), control_token="t")  # type: ignore[arg-type]
    return [route for route in app._rest.routes if isinstance(route, Route)]


def is_answered(method: Method) -> bool:
    """Whether the gateway has a route for it."""
    scope = {"type": "http", "method": method.verb, "path": method.example, "headers": []}
    return any(route.matches(scope)[0] is Match.FULL for route in _routes())


def page() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION.format(openai=openai.__version__, anthropic=anthropic.__version__)]
    answered: dict[tuple[str, str], list[Method]] = {}
    refused: dict[str, list[Method]] = {}
    local: list[str] = []
    for method in methods():
        if method.verb == LOCAL:
            local.append(f"`{method.sdk}`: `{method.name}`")
        elif is_answered(method):
            answered.setdefault((method.verb, method.path), []).append(method)
        else:
            refused.setdefault(method.beginning, []).append(method)
    for (verb, path), those in answered.items():
        route = f"{verb} {path}".replace("{}", "…")
        parts.append(f"| `{route}` | {WORDS[verb, path]} | {_all_of(those)} |\n")
    parts.append(REFUSED)
    alike: dict[str, list[str]] = {}
    for beginning in sorted(refused):
        alike.setdefault(NOT_OFFERED[beginning], []).append(beginning)
    for instead, beginnings in alike.items():
        those = [method for beginning in beginnings for method in refused[beginning]]
        paths = ", ".join(f"`{beginning}`" for beginning in beginnings)
        parts.append(f"| {paths} | {instead} | {_resources_of(those)} |\n")
    parts.append(LOCALLY.format(names=", ".join(local)))
    return "".join(parts)


def _all_of(those: Sequence[Method]) -> str:
    """The methods, by SDK and resource."""
    named: dict[tuple[str, str], list[str]] = {}
    for method in those:
        named.setdefault((method.sdk, method.resource), []).append(method.name.rpartition(".")[2])
    found: dict[str, list[str]] = {}
    for (sdk, resource), names in named.items():
        found.setdefault(sdk, []).append(f"`{resource}.` {', '.join(names)}")
    return "; ".join(f"{sdk}: {'; '.join(resources)}" for sdk, resources in found.items())


def _resources_of(those: Sequence[Method]) -> str:
    """The resources, by SDK, without those that are inside another one."""
    found: dict[str, dict[str, None]] = {}
    for method in those:
        words = method.resource.split(".")
        outermost = ".".join(words[: 2 if words[0] == "beta" else 1])
        found.setdefault(method.sdk, {})[f"`{outermost}`"] = None
    return "; ".join(f"{sdk}: {', '.join(resources)}" for sdk, resources in found.items())


def refused_by(method: Method) -> str:
    """The sentence that refuses it."""
    fault = refusal(method.verb, method.example, {})
    assert fault is not None, f"{method.verb} {method.example} has no row in not_offered.py"
    body: Any = fault.body
    return str(body["error"]["message"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
