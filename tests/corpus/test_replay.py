"""Every recorded body of a real client is answered, and the gateway names the same fields as without effect."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from tests.corpus.recorded import BODIES, STREAMED, Recorded, features, read, scrubbed
from tests.corpus.replayed import able_gateway

from midflight.testing.virtual_time import run_virtual


@pytest.mark.parametrize("name", sorted(path.stem for path in BODIES.glob("*.json")))
def test_all_that_a_client_sent_is_answered(name: str) -> None:
    bodies = [one for one in read() if one.client.lower() == name]
    assert bodies

    async def main() -> None:
        async with able_gateway(lambda prompt: "hello") as http:
            for one in bodies:
                answer = await http.post(one.path, json=one.body)
                assert answer.status_code == 200, (one.features, answer.text)
                assert answer.headers.get("x-midflight-ignored", "") == one.ignored
                if not one.body.get("stream") and not one.path.endswith(STREAMED):
                    assert answer.json()

    run_virtual(main())


def test_what_is_kept_of_a_body_is_its_form() -> None:
    one, other = "0123456789abcdef", "123e4567-e89b-12d3-a456-426614174000"
    body = {
        "stream": True,
        "system": "You are a tool of somebody else, and these are the words that it was given.",
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": f"call_{one}", "function": {"name": "f", "arguments": '{"path": "/tmp/x/y.txt"}'}}],
            },
            {"role": "tool", "tool_call_id": f"call_{one}", "content": "ok"},
        ],
        "metadata": {"session": other},
    }
    kept = scrubbed(body)
    assert kept["system"] == "(text of 75 letters)"
    assert kept["messages"][0]["tool_calls"][0]["id"] == kept["messages"][1]["tool_call_id"] == "call_0000000000000001"
    assert json.loads(kept["messages"][0]["tool_calls"][0]["function"]["arguments"]) == {"path": "/scratch"}
    assert kept["metadata"]["session"] == "00000000-0000-0000-0000-000000000002"
    assert features(kept) == features(body) == "streamed, results of tools"


def test_no_body_tells_of_the_machine_that_it_was_recorded_on() -> None:
    folders = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path("/home"))
    for one in read():
        text = json.dumps(one.body)
        assert not any(f"{folder}/" in text for folder in folders), (one.client, one.features)
        assert one.version and one == Recorded(**vars(one))
