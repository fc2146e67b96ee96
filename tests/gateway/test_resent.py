"""A conversation that is sent again costs what is new in it, and nothing else about it changes: whatever an agent does to its history, the
gateway that reads what is new gives what one gives that reads everything."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.conversing import WORDED_TEMPLATE
from tests.gateway.offered import KEY, Offered, ScriptedGenerator, offered
from tests.text.conftest import THINKING_TEMPLATE, bpe_folder, bpe_tokenizer  # noqa: F401  (fixtures)
from tests.text.templates import TEMPLATES

from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects import resent
from midflight.gateway.sessions.tree import TokenTree
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text import ChatTemplate, Tokenizer
from midflight.text.byte_tokenizer import CHAT_TEMPLATE
from midflight.trajectories.database import decode_turn, encode_turn, whole_turns
from midflight.types import SamplingParams
from midflight.types.facts import TurnKept

LIMITS = EngineLimits(max_context=2**16, vocab_size=2**16)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":"fox",  "n": 2.0}}\n</tool_call>'
SAID = [
    "yo",
    "the quick fox",
    " a \n",
    "",
    "<think>\nhm\n</think>\n\nwell",
    CALL,
    f"Wait. {CALL}",
    f"<think> so </think>{CALL}\n{CALL}",
    "🦊 東京",
]
ASKED = ["hi", "the lazy dog", "", "<tool_response>x</tool_response>", 'a "quoted" line\n', "über 🦊", "more"]


@pytest.fixture(scope="module", autouse=True)
def short_bodies_too() -> Iterator[None]:
    """Bodies of a few messages are remembered as long ones are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resent, "LEAST_BYTES", 0)
        yield


def made(tokenizer: Tokenizer, template: str, end: str) -> Tokenizer:
    eos = tokenizer.backend.token_to_id(end)
    specials = {"bos_token": end, "eos_token": end}
    return Tokenizer(tokenizer.backend, template=ChatTemplate(template, specials), eos_token_ids=frozenset({eos}))


@dataclass
class Side:
    """One of the two gateways that get the same bodies."""

    it: Offered
    kept: list[TurnKept] = field(default_factory=list[TurnKept])
    said: str = ""
    """The last answer, word for word."""

    def __post_init__(self) -> None:
        self.it.gateway.on_turn = self.kept.append
        self.handle = self.it.gateway.open(KEY, sampling=SamplingParams(max_tokens=250), tracked=True)
        self.session = self.it.gateway.session_for(path_token=self.handle.api_key, api_key=None)

    async def ask(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        answer = await self.it.http.post(f"http://memory/s/{self.handle.api_key}{path}", content=body, headers=headers)
        told = {name: value for name, value in answer.headers.items() if name.startswith("x-midflight")}
        self.said = answer.text
        return answer.status_code, nameless(answer.text), told

    def record(self) -> Any:
        record = self.it.gateway.close(self.handle.session_id)
        rows = [
            (
                *(None if getattr(row, name) is None else getattr(row, name).tolist() for name in ("token_ids", "generated", "loss_mask")),
                *(None if getattr(row, name) is None else getattr(row, name).tolist() for name in ("logprobs", "versions", "turns")),
                row.records,
            )
            for row in record.rows
        ]
        counts = (record.num_turns, record.num_branches, record.num_rewritten, record.num_mismatches, record.truncated, record.room)
        return rows, counts, record.masked, record.dropped, record.failed_requests


def nameless(text: str) -> str:
    """An answer without the names that are drawn anew for each request."""
    text = re.sub(r"(chatcmpl-|msg_|req_)[\w.:/\-]+", r"\1", text)
    return re.sub(r"(call_|toolu_)[0-9a-f]+", r"\1", text)


@asynccontextmanager
async def both(tokenizer: Tokenizer, texts: list[str]) -> AsyncIterator[tuple[Side, Side]]:
    """A gateway that reads what is new, and one that reads everything."""
    new, old = (ScriptedGenerator(tokenizer=tokenizer, texts=list(texts)) for _ in range(2))
    async with offered(new, limits=LIMITS) as one, offered(old, limits=LIMITS) as other:
        first, second = Side(one), Side(other)
        one.gateway.registry._matcher.num_to_prove = 0
        second.session.keep_seams = lambda: None  # type: ignore[method-assign]
        yield first, second


@dataclass
class Agent:
    """Makes the bodies of one conversation."""

    dialect: str
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    compact: bool = True
    marks: bool = False

    @property
    def path(self) -> str:
        return {"chat": "/v1/chat/completions", "messages": "/v1/messages"}[self.dialect]

    def body(self, **more: Any) -> bytes:
        base: dict[str, Any] = {"messages": self.messages, "model": "policy", "max_tokens": 250}
        if self.marks:
            base["messages"] = copy.deepcopy(self.messages)
            last = base["messages"][-1]
            if isinstance(last.get("content"), str):
                last["content"] = [{"type": "text", "text": last["content"] or "x"}]
            if last.get("content"):
                last["content"][-1]["cache_control"] = {"type": "ephemeral"}
        separators = (",", ":") if self.compact else (", ", ": ")
        return json.dumps(base | self.fields | more, ensure_ascii=not self.compact, separators=separators).encode()

    def hear(self, answer: dict[str, Any]) -> None:
        """Takes the reply into its history, as a client does."""
        if self.dialect == "chat":
            message = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
            self.messages.append(message)
            for call in message.get("tool_calls", []):
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a fox"})
            return
        self.messages.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "a fox"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})


Deed = tuple[str, int]
DEEDS = ["on"] * 12 + [
    "edit",
    "cut",
    "again",
    "retry",
    "spaced",
    "system",
    "tools",
    "options",
    "choices",
    "stream",
    "reworded",
    "unread",
    "marks",
    "bad",
    "twice",
    "forced",
    "other dialect",
    "begin again",
]


def change(agent: Agent, deed: str, k: int) -> None:
    """What the agent does to its history before it asks again."""
    messages = agent.messages
    place = k % len(messages) if messages else 0
    match deed:
        case "edit" if messages:
            messages[place] = {**messages[place], "content": f"edited {k}"}
            messages[place].pop("tool_calls", None)
            if messages[place]["role"] == "tool":
                messages[place] = {"role": "user", "content": "no result"}
        case "cut" if messages:
            del messages[place + 1 :]
        case "spaced":
            agent.compact = not agent.compact
        case "system" if agent.dialect == "messages":
            agent.fields["system"] = f"rule {k % 2}"
        case "system":
            if messages and messages[0]["role"] == "system":
                del messages[0]
            else:
                messages.insert(0, {"role": "system", "content": f"rule {k}"})
        case "tools" if agent.dialect == "chat":
            agent.fields["tools"] = [[TOOL], [TOOL, OTHER]][k % 2]
        case "tools":
            schemas = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in (TOOL, OTHER)]  # type: ignore[index]
            agent.fields["tools"] = schemas[: 1 + k % 2]
        case "options" if agent.dialect == "chat":
            agent.fields["chat_template_kwargs"] = {"enable_thinking": bool(k % 2)}
        case "options":
            agent.fields["thinking"] = {"type": "disabled"}
        case "reworded" if messages:
            own = [m for m in messages if m["role"] == "assistant" and isinstance(m.get("content"), str)]
            if own:
                own[k % len(own)]["content"] = own[k % len(own)]["content"].strip() + " " * (k % 2)
        case "unread" if messages:
            messages[place][f"odd{k % 2}"] = k
        case "marks":
            agent.marks = not agent.marks
        case _:
            pass


async def play(sides: tuple[Side, Side], agent: Agent, deeds: list[Deed]) -> None:
    new, old = sides
    body = b""
    for deed, k in deeds:
        change(agent, deed, k)
        headers: dict[str, str] = {}
        more: dict[str, Any] = {}
        if deed == "other dialect" and not any(isinstance(m.get("content"), list) for m in agent.messages):
            agent.dialect = "chat"
        if deed == "begin again":
            for side in sides:
                side.session.begin_again()
        if deed == "choices" and agent.dialect == "chat":
            more["n"] = 2
        if deed == "forced" and "tools" in agent.fields:
            more["tool_choice"] = "required" if agent.dialect == "chat" else {"type": "any"}
        if deed in ("on", "begin again") or not agent.messages or agent.messages[-1]["role"] == "assistant":
            agent.messages.append({"role": "user", "content": ASKED[k % len(ASKED)] or "x"})
        if deed == "bad":
            more["messages"] = [*agent.messages, {"role": "nobody", "content": "x"}]
        if deed == "stream":
            more["stream"] = True
        if deed != "retry" or not body:
            body = agent.body(**more)
        if deed == "twice":
            body = body[:-1] + b',"mess\\u0061ges":[{"role":"user","content":"instead"}]}'
        if deed == "retry":
            headers["x-stainless-retry-count"] = "1"
        got, expected = await new.ask(agent.path, body, headers), await old.ask(agent.path, body, headers)
        assert got == expected
        if deed in ("again", "bad", "twice", "stream", "retry") or got[0] != 200:
            continue
        agent.hear(json.loads(old.said))
    requests = [side.it.generator.requests for side in sides]
    assert len(requests[0]) == len(requests[1])
    for one, other in zip(*requests, strict=True):
        assert tuple(one.input_ids) == tuple(other.input_ids)
        assert (one.num_prompt_tokens, one.sampling, one.eager, one.wants_kept) == (
            other.num_prompt_tokens,
            other.sampling,
            other.eager,
            other.wants_kept,
        )
    assert [(kept.number, kept.turn) for kept in new.kept] == [(kept.number, kept.turn) for kept in old.kept]
    if "begin again" not in [deed for deed, _ in deeds]:
        stored = [(kept.number, decode_turn(encode_turn(kept.turn))) for kept in new.kept]
        assert whole_turns(stored) == [kept.turn for kept in old.kept]
    assert [node.digest for node in new.session.tree.nodes] == [node.digest for node in old.session.tree.nodes]
    assert new.record() == old.record()


def tokenizers_of(bpe: Tokenizer) -> dict[str, Tokenizer]:
    plain = scripted_tokenizer()
    found = {"bytes": made(plain, CHAT_TEMPLATE, "<|end|>")}
    found |= {
        "worded": made(bpe, WORDED_TEMPLATE, "<|im_end|>"),
        "thinking": made(bpe, THINKING_TEMPLATE, "<|im_end|>"),
    }
    for name, template in TEMPLATES.items():
        found[name] = made(bpe, template, "<|im_end|>")
    return found


@pytest.fixture(scope="module")
def known(bpe_tokenizer: Tokenizer) -> dict[str, Tokenizer]:  # noqa: F811
    return tokenizers_of(bpe_tokenizer)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["bytes", "worded", "thinking", *TEMPLATES]),
    dialect=st.sampled_from(["chat", "messages"]),
    deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 30)), min_size=3, max_size=14),
    said=st.lists(st.sampled_from(SAID), min_size=1, max_size=40),
)
def test_what_is_new_gives_what_everything_gives(
    known: dict[str, Tokenizer], name: str, dialect: str, deeds: list[Deed], said: list[str]
) -> None:
    tokenizer = known[name]
    end = tokenizer.decode(tuple(tokenizer.eos_token_ids))

    async def main() -> None:
        async with both(tokenizer, [text + end for text in said] * 2) as sides:
            await play(sides, Agent(dialect), deeds)

    run_virtual(main())


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of messages of the conversations that are read from their beginning."""
    seen: list[int] = []
    plain: Callable[..., Any] = TokenTree._plan_whole

    def counted(self: TokenTree, messages: Any, *others: Any) -> Any:
        seen.append(len(messages))
        return plain(self, messages, *others)

    monkeypatch.setattr(TokenTree, "_plan_whole", counted)
    return seen


RESUMED = ["bytes", "worded", "chatml with tools", "llama", "mistral", "prompts at the end"]
"""The templates that can go on."""


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_from_the_third_turn_on_only_what_is_new_is_read(
    known: dict[str, Tokenizer], name: str, dialect: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = known[name]
    end = tokenizer.decode(tuple(tokenizer.eos_token_ids))
    whole = watched(monkeypatch)

    async def main() -> None:
        async with offered(ScriptedGenerator(tokenizer=tokenizer, texts=[f"yo{end}"] * 6), limits=LIMITS) as it:
            it.gateway.registry._matcher.num_to_prove = 0
            side, agent = Side(it), Agent(dialect)
            for number in range(6):
                agent.messages.append({"role": "user", "content": f"the {number}. question"})
                status, _, _ = await side.ask(agent.path, agent.body(stream=stream), {})
                assert status == 200
                agent.messages.append({"role": "assistant", "content": "yo"})
            assert whole == [1, 3]
            assert [node.num_prompt - node.start for node in side.session.tree.nodes][2:] == [
                side.session.tree.nodes[1].num_prompt - side.session.tree.nodes[1].start
            ] * 4
            assert side.session.tree.num_branches == 0

    run_virtual(main())


@pytest.mark.parametrize("name", ["qwen", "chatml with tools"])
def test_results_of_tools_go_on_where_a_template_cuts_the_thoughts_before_the_last_question(
    known: dict[str, Tokenizer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = known[name]
    end = tokenizer.decode(tuple(tokenizer.eos_token_ids))
    whole = watched(monkeypatch)

    async def main() -> None:
        async with offered(
            ScriptedGenerator(tokenizer=tokenizer, texts=[f"<think>\nhm\n</think>\n\n{CALL}{end}"] * 6), limits=LIMITS
        ) as it:
            it.gateway.registry._matcher.num_to_prove = 0
            side, agent = Side(it), Agent("chat", fields={"tools": [TOOL]})
            agent.messages.append({"role": "user", "content": "find a fox"})
            for _ in range(6):
                status, _, _ = await side.ask(agent.path, agent.body(), {})
                assert status == 200
                agent.hear(json.loads(side.said))
            assert whole == [1, 3]

    run_virtual(main())


def test_marks_for_a_cache_that_move_cost_the_messages_that_they_moved_over(
    known: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some agents mark the last message, and take the mark away with the next: an older body is the one that goes on."""
    tokenizer = known["chatml with tools"]
    end = tokenizer.decode(tuple(tokenizer.eos_token_ids))
    whole = watched(monkeypatch)

    async def main() -> None:
        async with offered(ScriptedGenerator(tokenizer=tokenizer, texts=[f"yo{end}"] * 8), limits=LIMITS) as it:
            it.gateway.registry._matcher.num_to_prove = 0
            side, agent = Side(it), Agent("messages", marks=True)
            for number in range(8):
                agent.messages.append({"role": "user", "content": [{"type": "text", "text": f"question {number}"}]})
                status, _, told = await side.ask(agent.path, agent.body(), {})
                assert (status, told["x-midflight-ignored"]) == (200, "messages.content.cache_control")
                agent.messages.append({"role": "assistant", "content": [{"type": "text", "text": "yo"}]})
            assert side.session.tree.num_branches == 0
            assert whole == [1, 3, 5]

    run_virtual(main())


@pytest.mark.parametrize("name", ["counts", "dates"])
def test_a_template_that_looks_at_the_end_writes_everything(
    known: dict[str, Tokenizer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = known[name]
    end = tokenizer.decode(tuple(tokenizer.eos_token_ids))
    whole = watched(monkeypatch)

    async def main() -> None:
        async with offered(ScriptedGenerator(tokenizer=tokenizer, texts=[f"yo{end}"] * 5), limits=LIMITS) as it:
            side, agent = Side(it), Agent("chat")
            for _ in range(5):
                agent.messages.append({"role": "user", "content": "hi"})
                status, _, _ = await side.ask(agent.path, agent.body(), {})
                assert status == 200
                agent.messages.append({"role": "assistant", "content": "yo"})
            assert whole[-1] == 9

    run_virtual(main())


def test_the_first_prompts_are_compared_with_the_whole_and_one_that_differs_ends_all(
    known: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = known["bytes"]
    template = tokenizer.template
    assert template is not None
    plain = ChatTemplate.write_on

    def wrong(self: ChatTemplate, messages: Any, **options: Any) -> Any:
        found = plain(self, messages, **options)
        return found if options.get("since") is None else type(found)(found.text + "!", found.start, found.place)

    monkeypatch.setattr(ChatTemplate, "write_on", wrong)

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"] * 5), limits=LIMITS) as it:
            side, agent = Side(it), Agent("chat")
            for _ in range(5):
                agent.messages.append({"role": "user", "content": "hi"})
                await side.ask(agent.path, agent.body(), {})
                agent.messages.append({"role": "assistant", "content": "yo"})
            texts = [tokenizer.decode(request.input_ids) for request in it.generator.requests]
            assert not any("!" in text for text in texts)
            assert "prompts are made of whole conversations from now on" in caplog.text

    run_virtual(main())


def test_a_refusal_names_the_place_in_the_whole_conversation(known: dict[str, Tokenizer]) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"] * 5), limits=LIMITS) as it:
            side, agent = Side(it), Agent("chat")
            for _ in range(3):
                agent.messages.append({"role": "user", "content": "hi"})
                await side.ask(agent.path, agent.body(), {})
                agent.messages.append({"role": "assistant", "content": "yo"})
            agent.messages.append({"role": "robot", "content": "hi"})
            status, text, _ = await side.ask(agent.path, agent.body(), {})
            assert status == 400 and "messages.6.role is 'robot'" in text

    run_virtual(main())


def test_a_session_keeps_no_body_and_no_text_of_its_conversation(known: dict[str, Tokenizer]) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>"] * 12), limits=LIMITS) as it:
            side, agent = Side(it), Agent("chat")
            for number in range(12):
                agent.messages.append({"role": "user", "content": f"{number} " + "x" * 100})
                await side.ask(agent.path, agent.body(), {})
                agent.messages.append({"role": "assistant", "content": "yo"})
            prompt = side.session.tree.nodes[-1]
            assert len(prompt.tail) < 4 * 150
            (request,) = it.generator.requests[-1:]
            assert len(request.input_ids) > 1200

    run_virtual(main())


class Counting(Tokenizer):
    """Remembers how many letters it was given."""

    def __init__(self) -> None:
        plain = scripted_tokenizer()
        super().__init__(plain.backend, template=plain.template, eos_token_ids=plain.eos_token_ids)
        self.num_letters = 0

    def encode(self, text: str) -> tuple[int, ...]:
        self.num_letters += len(text)
        return super().encode(text)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_of_a_long_conversation_only_what_is_new_is_tokenised_and_counted(dialect: str) -> None:
    tokenizer = Counting()
    limits = EngineLimits(max_context=2**20, vocab_size=262)

    async def main() -> None:
        async with offered(ScriptedGenerator(tokenizer=tokenizer, texts=["yo<|end|>"] * 5), limits=limits) as it:
            it.gateway.registry._matcher.num_to_prove = 0
            side, agent = Side(it), Agent(dialect)
            counted: list[int] = []
            for number in range(5):
                agent.messages.append({"role": "user", "content": "a" * (200_000 if number == 0 else 100)})
                tokenizer.num_letters = 0
                status, _, _ = await side.ask(agent.path, agent.body(), {})
                assert status == 200
                counted.append(tokenizer.num_letters)
                agent.messages.append({"role": "assistant", "content": "yo"})
            assert min(counted[:2]) > 200_000 and max(counted[2:]) < 600

    run_virtual(main())
