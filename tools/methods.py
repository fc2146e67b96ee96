"""docs/methods.md, made from the SDKs of OpenAI, Anthropic and Google and from the gateway's routes: `python tools/methods.py docs/methods.md`.

Each method of the SDKs is found by looking at the classes of their clients. Which of them has a route here is asked of the gateway's
application; the others have a sentence in the table of refusals.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import openai
from google import genai
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
GOOGLE = "google-genai"
SOCKET = "WebSocket"
LOCAL = "local"
"""A method that asks no server."""
VERTEX = "Vertex"
"""A method that asks Google's cloud alone: the client refuses it where a key is given."""

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
    ("POST", "/v1beta/models/{}:generateContent"): "a content, whole",
    ("POST", "/v1beta/models/{}:streamGenerateContent"): "the same, streamed",
    ("POST", "/v1beta/models/{}:countTokens"): "how many tokens contents have",
    ("GET", "/v1beta/models"): "the model that is served",
    ("GET", "/v1beta/models/{}"): "the same, by its name",
    (
        "GET",
        "/v1beta/models/{}/operations/{}",
    ): "**refused** by 404: nothing is made in the background",
}
"""What is answered, by verb and path."""

INTRODUCTION = """# Methods of the SDKs

*A page to look things up in.*

Made by `python tools/methods.py docs/methods.md` from `openai` {openai}, `anthropic` {anthropic} and `google-genai` {google}; edit the
sentences there.

Every method that asks a server is answered, or refused by status 404 (`not_offered`) with what to use instead. A `beta` method is answered as the
one without `beta`.

## Answered

| route | what comes | methods |
|---|---|---|
"""
REFUSED = """
## Refused

All methods below a resource:

| resources | use instead |
|---|---|
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
    """All methods of the SDKs, in their order."""
    found: list[Method] = []
    for sdk, (client, prefix) in CLIENTS.items():
        for resource, path in _resources(client):
            found += [_method(sdk, prefix, resource, path, name) for name in _names(resource)]
    for resource, path in _resources(genai.Client):
        found += [_googles(resource, path, name) for name in _names(resource)]
    return (*found, Method(GOOGLE, "aio.live.connect", SOCKET, _LIVE))


def _resources(cls: type, path: str = "") -> Iterator[tuple[type, str]]:
    """The classes of a client that have methods, with the names by which they are reached."""
    for name in dir(cls):
        if name.startswith(("_", "with_raw_response", "with_streaming_response", "aio")):
            continue
        attribute = inspect.getattr_static(cls, name)
        made = getattr(attribute, "func", None) or getattr(attribute, "fget", None)
        found = None if made is None else _class_of(made)
        if found is not None:
            yield found, f"{path}{name}"
            yield from _resources(found, f"{path}{name}.")
    for name, annotation in inspect.get_annotations(cls).items():
        inner = getattr(sys.modules[cls.__module__], str(annotation), None)
        if inspect.isclass(inner) and inner.__module__.startswith(_OF_GOOGLE):
            yield inner, f"{path}{name}"


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
    if not inspect.isclass(found):
        return None
    is_one = ".resources" in found.__module__ or found.__module__.startswith(_OF_GOOGLE)
    return found if is_one else None


def _names(resource: type) -> list[str]:
    found: list[str] = []
    for name in dir(resource):
        method = inspect.getattr_static(resource, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if not method.__module__.endswith(".basesdk"):
            found.append(name)
    return found


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


# --- Google's SDK, whose methods name their path in a variable --------------------------------------

_OF_GOOGLE = "google.genai"
_LIVE = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
_NAMED = re.compile(r"path = f?'((?!\{path\})[^']+)'(?!\.format_map)")
_ASKED = re.compile(r"_api_client\.(?:request|request_streamed)\(\s*'(\w+)'")
_GENERATED = re.compile(r'method="(\w+)",\s*path="(/upload)?/\{api_version\}(/[^"]*)"')
_INNER = re.compile(r"(?:self|super\(\))\.(\w+)\b")
_STANDS_FOR: dict[str, str] = {
    "models": "models/{}",
    "caches": "cachedContents/{}",
    "tunings": "tunedModels/{}",
    "operations": "models/{}/operations/{}",
    "environments.files": "environments/{}",
    "file_search_stores": "fileSearchStores/{}",
    "file_search_stores.documents": "fileSearchStores/{}/documents/{}",
}
"""What a path that is a name alone holds, by resource."""


def _googles(resource: type, path: str, name: str) -> Method:
    verb, sent = _googles_request(resource, name) or (LOCAL, "")
    if verb in (LOCAL, VERTEX):
        return Method(GOOGLE, f"{path}.{name}", verb, "")
    sent = sent.partition("?")[0].replace("{models_url}", "models")
    sent = sent.replace("{parent}/documents", "fileSearchStores/{}/documents")
    if sent.startswith("upload/"):
        sent = "/" + sent.replace("{api_version}", "v1beta")
    first = re.match(r"\{\w+\}", sent)
    if first is not None:
        stands_for = "models/{}" if first[0] == "{model}" else _STANDS_FOR[path]
        sent = stands_for + sent[first.end() :]
    sent = sent.replace("{file_search_store_name}", "fileSearchStores/{}")
    sent = re.sub(r"\{[^}]*\}", "{}", sent)
    return Method(GOOGLE, f"{path}.{name}", verb, sent if sent[0] == "/" else f"/v1beta/{sent}")


def _googles_request(
    resource: type, name: str, seen: tuple[str, ...] = ()
) -> tuple[str, str] | None:
    """Verb and path of what a method sends, by itself or by another method of its resource."""
    found: tuple[str, str] | None = None
    for cls in resource.__mro__:
        if name not in cls.__dict__ or not inspect.isfunction(cls.__dict__[name]):
            continue
        source = inspect.getsource(cls.__dict__[name])
        generated = _GENERATED.search(source)
        if generated is not None:
            return generated[1], f"{generated[2] or ''}/v1beta{generated[3]}"
        paths = _NAMED.findall(source)
        asked = _ASKED.search(source)
        if paths and asked is not None:
            of_cloud = "if not self._api_client.vertexai:\n      raise" in source
            return (VERTEX, "") if of_cloud else (asked[1].upper(), paths[-1])
        if "_api_client.download_file(" in source:
            files = re.search(r"path = \(?\s*f'([^']+)'", source)
            return "GET", files[1] if files else ""
        internal = re.search(r"self\._internal\.(\w+)\(", source)
        if internal is not None:
            module = importlib.import_module("google.genai._gaos._internal")
            return _googles_request(module.Internal, internal[1])
        for inner in _INNER.findall(source):
            if inner in (*seen, name):
                continue
            found = _googles_request(resource, inner, (*seen, name)) or found
            if found is not None and found[0] != VERTEX:
                return found
    return found


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
    versions = {"openai": openai.__version__, "anthropic": anthropic.__version__}
    parts = [INTRODUCTION.format(**versions, google=genai.__version__)]
    answered: dict[tuple[str, str], list[Method]] = {}
    refused: dict[str, list[Method]] = {}
    for method in methods():
        if method.verb in (LOCAL, VERTEX):
            continue
        if is_answered(method):
            answered.setdefault((method.verb, method.path), []).append(method)
        else:
            refused.setdefault(method.beginning, []).append(method)
    for (verb, path), those in answered.items():
        route = f"{verb} {path}".replace("{}", "…")
        parts.append(f"| `{route}` | {WORDS[verb, path]} | {_all_of(those)} |\n")
    parts.append(REFUSED)
    partly = {name for group in answered.values() for one in group for name in _beginnings(one)}
    alike: dict[str, list[str]] = {}
    for beginning in sorted(refused):
        alike.setdefault(NOT_OFFERED[beginning], []).append(beginning)
    for instead, beginnings in alike.items():
        those = [method for beginning in beginnings for method in refused[beginning]]
        parts.append(f"| {_resources_of(those, partly)} | {instead} |\n")
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


def _resources_of(those: Sequence[Method], answered: Set[str]) -> str:
    """What is refused, by SDK: the outermost resource, or if some of that is answered the inner one,
    or the method.
    """
    found: dict[str, dict[str, None]] = {}
    for method in those:
        words = method.resource.split(".")
        outermost = ".".join(words[: 2 if words[0] == "beta" else 1])
        names = (outermost, method.resource, method.name)
        name = next(name for name in names if f"{method.sdk} {name}" not in answered)
        found.setdefault(method.sdk, {})[f"`{name}`"] = None
    return "; ".join(f"{sdk}: {', '.join(resources)}" for sdk, resources in found.items())


def _beginnings(method: Method) -> Iterator[str]:
    """Every resource that it is inside of, with its SDK."""
    words = method.resource.split(".")
    for count in range(1, len(words) + 1):
        yield f"{method.sdk} {'.'.join(words[:count])}"


def refused_by(method: Method) -> str:
    """The sentence that refuses it."""
    fault = refusal(method.verb, method.example, {})
    assert fault is not None, f"{method.verb} {method.example} has no row in not_offered.py"
    body: Any = fault.body
    return str(body["error"]["message"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
