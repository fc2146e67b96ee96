"""Requests made from the OpenAPI document never end in a server's error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")

TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": TEXT},
        "additionalProperties": False,
    },
}
PROMPTS = {
    "messages": MESSAGES,
    "input": {"anyOf": [TEXT, MESSAGES]},
    "prompt": {"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": TEXT}]},
}


def document(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        return json.load(answer)


def short(found: dict[str, Any]) -> dict[str, Any]:
    """The same document with short answers: a limit above the room is lowered to the room, which is many tokens."""
    for name, schema in found["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if name.endswith(("Body", "Sampling")):
            limits = [limit for limit in properties if limit.startswith("max_")]
            properties |= {limit: {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 8}, {"type": "null"}]} for limit in limits}
    return found


def tightened(found: dict[str, Any]) -> dict[str, Any]:
    """The same document for prompts that are well formed and answers that are short: most requests then reach an engine."""
    for name, schema in found["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if name.endswith(("Body", "Sampling")) and properties:
            schema["additionalProperties"] = False
            properties |= {prompt: PROMPTS[prompt] for prompt in PROMPTS.keys() & properties.keys()}
            properties |= {limit: {"enum": [1, 3]} for limit in properties if limit.startswith("max_")}
    return found


def cases(schema: str, url: str, folder: Path, *, examples: int) -> int:
    """How many requests were tried; none may end in a 500."""
    command = [Path(sys.executable).parent / "st", "run", schema, "--url", url, "--checks", "not_a_server_error"]
    limits = [
        "--request-timeout",
        "120",
        "--max-examples",
        str(examples),
        "--phases",
        "fuzzing",
        "--generation-deterministic",
        "--workers",
        "1",
    ]
    ended = subprocess.run([*command, *limits], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-5000:]
    return int(re.search(r"(\d+) generated", ended.stdout)[1])


def test_no_request_that_the_document_allows_or_nearly_allows_is_a_500(served: str, tmp_path: Path) -> None:
    (tmp_path / "short.json").write_text(json.dumps(short(document(served))))
    assert cases(str(tmp_path / "short.json"), served, tmp_path, examples=30) > 200


def test_no_request_that_reaches_an_engine_is_a_500(served: str, tmp_path: Path) -> None:
    (tmp_path / "tightened.json").write_text(json.dumps(tightened(document(served))))
    assert cases(str(tmp_path / "tightened.json"), served, tmp_path, examples=40) > 300
