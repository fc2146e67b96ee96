"""How much a session keeps: ten thousand of 2 000 tokens each fit into 500 MB, which is 25 bytes for each token."""

from __future__ import annotations

import gc
import tracemalloc

from tests.gateway.generating import begun, receive
from tests.gateway.offered import DEFAULTS, KEY

from midflight.gateway.sessions.request import Messages
from midflight.gateway.sessions.session import Session
from midflight.gateway.sessions.tree import Matcher
from midflight.testing.script import scripted_tokenizer
from midflight.text import Message
from midflight.text.formats import AssistantMessage, MessageFormat
from midflight.types import Chunk, Finish, FinishReason

TOKENIZER = scripted_tokenizer()
MATCHER = Matcher(TOKENIZER, MessageFormat(TOKENIZER))
NUM_SESSIONS, NUM_TURNS = 200, 5
MAX_BYTES_PER_TOKEN = 25


def talked(number: int) -> tuple[Session, int]:
    """A session of five turns, each sampled under two versions, whose letters are tokens; and how many those are."""
    session = Session(f"mf-{number}", TOKENIZER, key=KEY, sampling=DEFAULTS, tracked=True, matcher=MATCHER)
    messages: tuple[Message, ...] = ()
    length = 0
    for k in range(NUM_TURNS):
        messages += ({"role": "user", "content": f"{number:06d} {k} " + "q" * 188},)
        prompt = session.plan(Messages(messages))
        session.seed("run", 0, prompt, asked=None, choice=0)
        reply = f"{k} {number:06d} " + "a" * 188
        ids = TOKENIZER.encode(reply + "<|end|>")
        answer = begun(session, prompt, policy_sampled=True, number=session.next_request())
        for start, version in ((0, 1000), (100, 1001)):
            part = ids[start : start + 100 if version == 1000 else None]
            finish = Finish(FinishReason.STOP, ids[-1]) if version == 1001 else None
            receive(answer, Chunk(part, (-0.25,) * len(part), version, version, finish))
        session.finished(answer, answer.close(), reply=reply, message=AssistantMessage(reply))
        messages += ({"role": "assistant", "content": reply},)
        length = len(prompt.ids) + len(ids)
    return session, length


def test_ten_thousand_sessions_fit_into_500_megabytes() -> None:
    talked(0)  # what is made once for all sessions
    gc.collect()
    tracemalloc.start()
    try:
        kept = [talked(number) for number in range(NUM_SESSIONS)]
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_tokens = sum(length for _, length in kept)
    assert 1950 < num_tokens / NUM_SESSIONS < 2050
    print(f"{num_bytes / num_tokens:.1f} bytes a token")
    assert num_bytes / num_tokens < MAX_BYTES_PER_TOKEN


def test_a_turn_costs_what_is_new_in_it() -> None:
    """Nothing of the history is kept again: the last of many turns is as large as the second."""
    session, length = talked(1)
    sizes = [len(node.tail) + len(node.output) + len(node.logprobs) for node in session.tree.nodes]
    assert max(sizes[1:]) - min(sizes[1:]) == 0
    assert sum(len(node.tail) + len(node.output) for node in session.tree.nodes) == 4 * length
