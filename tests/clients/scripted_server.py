"""The gateway over a scripted engine whose model answers by rule, on a free port; says `ready: URL`. Its argument is `gateway.sampling`.

| the last message | the answer |
|---|---|
| a tool's result, and JSON was asked for | `{"city": "Paris", "weather": <result>}`; where a tool `Report` is offered, a call of it with these |
| the assistant's that names the weather | the same, as a typed form of it |
| a tool's result | `The tool said: <result>.`; for an agent that must end by a call, a call of `final_answer` with it |
| `count` | one two three four five |
| asks for the weather, tools are offered | a call of `get_weather` for each city named |
| the form of DSPy is wanted | its fields, the tool first |
| `bash` is offered | a call of it that reads `weather.txt`; after its result one that hands that in |
| asks for the weather, code is wanted | a block of Python that prints the tool's answer as the final one |
| anything else | `hello` |
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.corpus.recorded import recording
from tests.shares import Heads

from midflight.config.sections import Config
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.http.http import build_app
from midflight.run.rollout.serving import Serving
from midflight.testing.script import Replies, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.types import Feature, GroupKey, RolloutKey, SamplingParams
from midflight.types.facts import record_nothing
from midflight.wire.server import serve_app

CITIES = ("Paris", "Rome")


def reply(prompt: str) -> str:
    """The model's answer to a rendered conversation."""
    head, role, text = parted(prompt.removesuffix("<|assistant|>"))
    if role == "system":  # some clients repeat their instructions at the end
        head, role, text = parted(head)
    if "[[ ## completed ## ]]" in prompt:
        return fields(text)
    if '"name": "bash"' in head:
        return call("bash", command=("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && " if role == "tool" else "") + "cat weather.txt")
    if "code_block_tags" in head or "```python" in head or "<code>" in head:
        return code()
    result = text if role == "tool" else (found[-1] if (found := re.findall(r"sunny in \w+", text)) and "Observation" in text else None)
    if role == "assistant" and (found := re.findall(r"sunny in \w+", text)):  # a typed form of what was said is asked for
        return call("Report", city="Paris", weather=found[-1]) if '"Report"' in head else report(found[-1])
    if result is not None and '"Report"' in head:
        return call("Report", city="Paris", weather=result)
    if result is not None and "in JSON" in prompt:
        return report(result)
    if result is not None:
        return call("final_answer", answer=f"The tool said: {result}.") if '"final_answer"' in head else f"The tool said: {result}."
    if "weather" in text and "get_weather" in head:
        return "\n".join(call("get_weather", city=city) for city in CITIES if city in text)
    return "one two three four five" if "count" in text else "hello"


def parted(conversation: str) -> tuple[str, str, str]:
    """What comes before the last message, its role and its text."""
    head, _, last = conversation.removesuffix("<|end|>").rpartition("<|")
    role, _, text = last.partition("|>")
    return head, role, text


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def report(weather: str) -> str:
    return json.dumps({"city": "Paris", "weather": weather})


def fields(asked: str) -> str:
    """DSPy's fields, named between marks."""
    if "next_tool_name" not in asked:
        said = {"reasoning": "I know.", "answer": "The tool said: sunny in Paris."}
    elif "observation_0" in asked:
        said = {"next_thought": "I know.", "next_tool_name": "finish", "next_tool_args": "{}"}
    else:
        said = {"next_thought": "I ask.", "next_tool_name": "get_weather", "next_tool_args": '{"city": "Paris"}'}
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in said.items()) + "[[ ## completed ## ]]"


def code() -> str:
    return "Thought: I ask the tool.\n<code>\nfinal_answer(get_weather(city='Paris'))\n</code>"


def sessions(gateway: Gateway, heads: set[str]) -> list[Route]:
    """Sessions as those of a run's rollouts: `POST /rollouts` opens one, `POST /rollouts/ID/end` tells what would be trained,
    and which fields the heads of answers have named since the last one."""
    numbers = count()

    async def opened(request: Request) -> Response:
        key = RolloutKey(GroupKey(0, next(numbers)), 0)
        handle = gateway.open(key, sampling=SamplingParams(max_tokens=4096), tracked=True)
        return JSONResponse({"session_id": handle.session_id, "base_url": handle.base_url})

    async def ended(request: Request) -> Response:
        record = gateway.close(request.path_params["session_id"])
        rows = [{"token_ids": row.token_ids.tolist(), "loss_mask": row.loss_mask.tolist()} for row in record.rows]
        counts = {name: getattr(record, name) for name in ("num_turns", "failed_requests", "masked", "masked_by", "replaced", "dropped")}
        named = sorted(heads)
        heads.clear()
        return JSONResponse({**counts, "rows": rows, "heads": named})

    return [Route("/rollouts", opened, methods=["POST"]), Route("/rollouts/{session_id}/end", ended, methods=["POST"])]


async def main() -> None:
    capabilities = replace(CAPABLE, max_context=32_768, features=frozenset(Feature))  # the replies obey the grammars they meet
    engine = ScriptedEngine(script=Replies(reply), capabilities=capabilities, step_seconds=0.0, chunk_tokens=3)
    config = Config.model_validate({"gateway": {"sampling": sys.argv[1]}})
    serving = Serving(config, scripted_tokenizer(), [engine], record=record_nothing, version=0, anonymous=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving.gateway.address = url
        named = set[str]()
        app = Heads(build_app(serving.gateway, serving.control, extra_routes=sessions(serving.gateway, named)))
        app.fields = named
        await serve_app(recording(app), listener, ready=lambda: print(f"ready: {url}", flush=True))


if __name__ == "__main__":
    asyncio.run(main())
