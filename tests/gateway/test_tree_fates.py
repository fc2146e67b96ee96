"""I3 and I4 over conversations of every kind: whatever an agent sends, no token is lost, trained twice or moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.conversing import hermes, worded
from tests.gateway.generating import begun, receive
from tests.gateway.offered import DEFAULTS, KEY
from tests.text.conftest import bpe_folder, bpe_tokenizer  # noqa: F401  (fixtures)

from midflight.gateway.sessions.session import Messages, Session, Source, Text, TokenIds
from midflight.gateway.sessions.tree import Matcher
from midflight.testing.script import scripted_tokenizer
from midflight.text import Message, Tokenizer
from midflight.text.formats import AssistantMessage
from midflight.types import Chunk, Finish, FinishReason, Json, Reason, SessionRecord

SAID = [
    "",
    "fox",
    "the quick ",
    "東京🦊",
    "<think>\nthe dog\n</think>\nfox",
    "<think> über",
    ' look <tool_call>\n{"name": "f",  "arguments": {"b": 1, "a": "東"}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
]


@dataclass
class Asked:
    """One request of an agent, drawn."""

    origin: int
    """Which of the ways on so far it takes, counted from the newest."""
    kind: str
    said: str
    choices: list[tuple[int, bool, bool, int, bool]]
    """What the model says, whether by other tokens, whether to its end, how many tokens too much, whether it is abandoned."""
    sampled: bool
    form: int
    """How the client writes the last reply."""


REQUESTS = st.lists(
    st.builds(
        Asked,
        origin=st.integers(0, 5),
        kind=st.sampled_from(["chat", "chat", "chat", "tools", "new", "text", "ids"]),
        said=st.text("x 東", max_size=3),
        choices=st.lists(
            st.tuples(
                st.integers(0, len(SAID) - 1), st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 5).map(lambda k: k == 0)
            ),
            min_size=1,
            max_size=3,
        ),
        sampled=st.integers(0, 4).map(bool),
        form=st.integers(0, 5),
    ),
    min_size=2,
    max_size=8,
)


@dataclass
class Conversation:
    """An agent and a model in one session. The version of each answer is its serial number, so that rows show whose tokens they hold."""

    tokenizer: Tokenizer
    count_all: bool = False
    ways: list[tuple[Message, ...]] = field(default_factory=lambda: [()])
    sent: dict[int, tuple[int, ...]] = field(default_factory=dict)
    received: dict[int, tuple[int, ...]] = field(default_factory=dict)
    not_policy: set[int] = field(default_factory=set)
    abandoned: set[int] = field(default_factory=set)
    num_overshoot: int = 0

    def __post_init__(self) -> None:
        self.format = hermes(self.tokenizer)
        matcher = Matcher(self.tokenizer, self.format)
        self.session = Session(
            "mf-1", self.tokenizer, key=KEY, sampling=DEFAULTS, tracked=True, matcher=matcher, count_all_choices=self.count_all
        )

    def run(self, requests: list[Asked]) -> SessionRecord:
        for asked in requests:
            self._ask(asked)
        return self.session.close()

    def _ask(self, asked: Asked) -> None:
        way = self.ways[-1 - asked.origin % len(self.ways)]
        messages = (*rewritten(way, asked.form), {"role": "tool" if asked.kind == "tools" else "user", "content": asked.said})
        messages = messages[-1:] if asked.kind == "new" else messages
        prompt = self.session.plan(self._source(asked, messages))
        if prompt.text is not None:
            assert prompt.respelled == (self.tokenizer.encode(prompt.text) != prompt.ids)
        if prompt.parent is not None:
            serial = next(iter(prompt.parent.segments)).version if prompt.parent.output else None
            assert serial is None or prompt.ids[: prompt.parent.end] == self.sent[serial] + self.received[serial], "I4"
        number = self.session.next_request()
        for said, other_tokens, ends, overshoot, is_abandoned in asked.choices:
            serial = len(self.received) + 1
            ids = self._spelled(SAID[said], other_tokens) + (self._end() if ends else ())
            self.sent[serial], self.received[serial] = prompt.ids, ids
            self.num_overshoot += overshoot
            answer = begun(self.session, prompt, policy_sampled=asked.sampled, number=number)
            finish = Finish(FinishReason.STOP) if ends else Finish(FinishReason.LENGTH)
            receive(answer, Chunk(ids, (-float(serial),) * len(ids), serial, serial, finish), num_overshoot=overshoot)
            if is_abandoned:
                self.session.abandoned(answer)
                self.abandoned.add(serial)
                continue
            if not asked.sampled:
                self.not_policy.add(serial)
            reply = self.tokenizer.decode(ids, skip_special=True)
            message = self.format.parse(reply, prompt.text, calls=True)
            self.session.finished(answer, answer.close(), reply=reply, message=message)
            self.ways.append((*messages, as_sent_back(message)))

    def _source(self, asked: Asked, messages: tuple[Message, ...]) -> Source:
        text = self.tokenizer.render(messages, add_generation_prompt=True)
        if asked.kind == "ids":
            known = [self.sent[serial] + ids for serial, ids in self.received.items()]
            start = known[asked.origin % len(known)] if known else ()
            return TokenIds(start + self.tokenizer.encode(asked.said + "x"))
        return Text(text) if asked.kind == "text" else Messages(messages)

    def _spelled(self, text: str, other_tokens: bool) -> tuple[int, ...]:
        return tuple(i for letter in text for i in self.tokenizer.encode(letter)) if other_tokens else self.tokenizer.encode(text)

    def _end(self) -> tuple[int, ...]:
        return (min(self.tokenizer.eos_token_ids),)


def as_sent_back(message: AssistantMessage) -> Message:
    calls: list[Json] = [
        {"id": f"c{k}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for k, c in enumerate(message.tool_calls)
    ]
    return {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning or None, "tool_calls": calls}


def rewritten(way: tuple[Message, ...], form: int) -> tuple[Message, ...]:
    """The conversation as this client sends it: as it was, in parts, without thoughts, calls anew, edited, summarised."""
    last = dict(way[-1]) if way else {}
    match form if way else 0:
        case 1:
            last |= {"content": f" {last['content']}", "refusal": None}
        case 2:
            last |= {"reasoning_content": None}
        case 3:
            calls = last["tool_calls"]
            assert isinstance(calls, list)
            last |= {"tool_calls": [*calls[1:], *calls[:1]]}
        case 4:
            last |= {"content": "edited"}
        case 5:
            return ({"role": "user", "content": "In short: fox."},)
        case _:
            return way
    return (*way[:-1], last)


def check(conversation: Conversation, record: SessionRecord) -> None:
    trained: Counter[int] = Counter()
    seen: set[int] = set()
    for row in record.rows:
        assert row.num_trainable and not (row.loss_mask & ~row.generated).any()
        here = {int(version) for version in row.versions[row.generated]}
        seen |= here
        for serial in here:
            held = row.generated & (row.versions == serial)
            start = int(held.argmax())
            sent, received = conversation.sent[serial], conversation.received[serial]
            assert tuple(row.token_ids[: start + len(received)]) == sent + received, "I4: what was sampled, after what was sent"
            assert (row.logprobs[held] == -serial).all()
            assert int(held.sum()) == len(received)
            trained[serial] += int((row.loss_mask & held).sum())
    lengths = {serial: len(ids) for serial, ids in conversation.received.items()}
    ended = {serial for serial, count in trained.items() if count}
    assert all(trained[serial] == lengths[serial] for serial in ended), "each in one row"
    assert not ended & (conversation.abandoned | conversation.not_policy)
    assert not seen & conversation.abandoned
    dropped, masked = Counter(record.dropped), Counter(record.masked)
    assert dropped.pop(Reason.OVERSHOOT, 0) == conversation.num_overshoot
    assert dropped.pop(Reason.ABANDONED, 0) == sum(lengths[serial] for serial in conversation.abandoned)
    unchosen = 0 if conversation.count_all else dropped.pop(Reason.UNCHOSEN, 0)
    not_policy = masked.pop(Reason.NOT_POLICY_SAMPLED, 0)
    assert not dropped and not masked
    assert not_policy + unchosen == sum(lengths[serial] for serial in lengths.keys() - conversation.abandoned - ended)
    assert not_policy <= sum(lengths[serial] for serial in conversation.not_policy)


@pytest.fixture(params=["bytes", "strips thoughts", "words replies"])
def tokenizer(request: pytest.FixtureRequest, bpe_tokenizer: Tokenizer) -> Tokenizer:  # noqa: F811
    """The template of the second cuts the thoughts of earlier turns, that of the third writes calls and thoughts itself."""
    return {"bytes": scripted_tokenizer(), "strips thoughts": bpe_tokenizer, "words replies": worded(bpe_tokenizer)}[request.param]


@given(requests=REQUESTS, count_all=st.booleans())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_token_is_trained_once_masked_or_dropped_and_lies_where_it_was_sampled(
    tokenizer: Tokenizer, requests: list[Asked], count_all: bool
) -> None:
    """I3, I4; and that mismatches are counted exactly, although the history is not tokenised again."""
    conversation = Conversation(tokenizer, count_all)
    check(conversation, conversation.run(requests))
