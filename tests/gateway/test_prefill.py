"""An answer that goes on with a message that the client began: what the model reads, what is told, and what is trained."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gateway.conversing import turn
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered

from midflight.errors import RequestRejected
from midflight.gateway.sessions.tree import TokenTree, harvest
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text import ChatTemplate, Ending, Tokenizer

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "The answer "}
TOKENIZER = scripted_tokenizer()


def prompt(*messages: dict[str, Any], ending: Ending = Ending.OPEN, tree: TokenTree | None = None) -> Any:
    return (tree or TokenTree(TOKENIZER)).plan_chat(messages, ending=ending)


def test_the_prompt_ends_with_the_text_that_was_begun_or_with_the_last_message() -> None:
    assert prompt(USER, BEGUN).text == "<|user|>hi<|end|><|assistant|>The answer "
    assert prompt(USER, BEGUN, ending=Ending.PLAIN).text == "<|user|>hi<|end|><|assistant|>The answer <|end|>"
    assert prompt(USER, ending=Ending.PLAIN).text == "<|user|>hi<|end|>"


def test_a_template_that_leaves_the_message_out_is_told_of() -> None:
    silent = Tokenizer(TOKENIZER.backend, template=ChatTemplate("{{ messages[0].content }}", {}), eos_token_ids=frozenset())
    with pytest.raises(RequestRejected, match="leaves out the last message"):
        TokenTree(silent).plan_chat([USER, BEGUN], ending=Ending.OPEN)


def test_what_was_begun_is_context_and_the_joined_message_is_found_again() -> None:
    """The row holds the beginning untrained, then the answer, then the next answer: one row, nothing tokenised anew."""
    tree = TokenTree(TOKENIZER)
    first = prompt(USER, BEGUN, tree=tree)
    said = TOKENIZER.encode("is 42<|end|>")
    tree.record(first, turn(first, said), reply="is 42", request=1)
    second = tree.plan_chat([USER, {"role": "assistant", "content": "The answer is 42"}, {"role": "user", "content": "and?"}])
    assert second.parent is tree.nodes[0] and second.ids[: len(first.ids) + len(said)] == first.ids + said
    tree.record(second, turn(second, TOKENIZER.encode("no<|end|>")), reply="no", request=2)
    (row,) = harvest(tree.nodes).rows
    trained = [int(i) for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == "is 42<|end|>no<|end|>" and (tree.num_rewritten, tree.num_branches) == (0, 0)


def test_an_answer_that_was_cut_goes_on_from_its_own_tokens() -> None:
    tree = TokenTree(TOKENIZER)
    first = tree.plan_chat([USER])
    cut = turn(first, TOKENIZER.encode("one two"))
    node = tree.record(first, cut, reply="one two", request=1)
    second = prompt(USER, {"role": "assistant", "content": "one two"}, tree=tree)
    assert second.parent is node and second.ids == first.ids + cut.output_ids and second.tail == b""
    tree.record(second, turn(second, TOKENIZER.encode(" three<|end|>")), reply=" three", request=2)
    third = tree.plan_chat([USER, {"role": "assistant", "content": "one two three"}, USER])
    assert third.parent is tree.nodes[1]
    (row,) = harvest(tree.nodes).rows
    assert int(row.loss_mask.sum()) == len(TOKENIZER.encode("one two three<|end|>"))


def test_an_answer_that_ended_by_itself_is_begun_anew_behind_its_text() -> None:
    tree = TokenTree(TOKENIZER)
    first = tree.plan_chat([USER])
    tree.record(first, turn(first, TOKENIZER.encode("one<|end|>")), reply="one", request=1)
    second = prompt(USER, {"role": "assistant", "content": "one"}, tree=tree)
    assert second.ids == TOKENIZER.encode("<|user|>hi<|end|><|assistant|>one") and second.parent is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 20}),
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
        ("/v1/chat/completions", {"continue_final_message": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_holds_only_what_is_new(path: str, body: dict[str, Any], stream: bool) -> None:
    async def main() -> None:
        generator = ScriptedGenerator(texts=["is 42<|end|>"])
        async with offered(generator) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS.changed(max_tokens=50), tracked=True)
            base = handle.base_url.removesuffix("/v1")
            answer = await it.http.post(base + path, json={"model": "policy", "messages": [USER, BEGUN], "stream": stream, **body})
            assert answer.status_code == 200, answer.text
            assert "The answer" not in answer.text and ("is 42" in answer.text or stream)
            record = it.gateway.close(handle.session_id)
            (row,) = record.rows
            assert int(row.loss_mask.sum()) == len(TOKENIZER.encode("is 42<|end|>"))

    run_virtual(main())
