from __future__ import annotations

import msgspec
import pytest
from tests.text.conftest import bpe_folder, bpe_tokenizer  # noqa: F401  (fixtures)

from midflight.gateway.sessions.history import Node, Prompt, digest
from midflight.gateway.sessions.tree import Matcher, TokenTree, harvest
from midflight.testing.script import scripted_tokenizer
from midflight.text import Message, Tokenizer
from midflight.types import Finish, FinishReason, OlderKeys, Reason, Segment, Turn
from midflight.types.digests import read_conditions

USER: Message = {"role": "user", "content": "hi"}


def answered(
    tree: TokenTree,
    tokenizer: Tokenizer,
    prompt: Prompt,
    output: str | tuple[int, ...],
    *,
    request: int = 1,
    sampled: bool = True,
    version: int = 0,
) -> str:
    """Records an answer; gives the text the agent sees."""
    ids = tokenizer.encode(output) if isinstance(output, str) else output
    reason = FinishReason.STOP if ids and ids[-1] in tokenizer.eos_token_ids else FinishReason.LENGTH
    segments = (Segment(version, version, 0, len(ids)),)
    turn = Turn(prompt.ids, ids, tuple(-0.1 * k for k in range(len(ids))), segments, Finish(reason), policy_sampled=sampled)
    reply = tokenizer.decode(ids, skip_special=True)
    tree.record(prompt, turn, reply=reply, request=request)
    return reply


def talk(*texts: str) -> list[Message]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def test_the_next_turn_holds_the_earlier_one_verbatim() -> None:
    """I4: the sampled ids, not those of the text tokenised again."""
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    first = tree.plan_chat([USER])
    assert first.ids == tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    answered(tree, tokenizer, first, "yo<|end|>")
    second = tree.plan_chat(talk("hi", "yo", "bye"))
    assert second.ids == tokenizer.encode("<|user|>hi<|end|><|assistant|>yo<|end|><|user|>bye<|end|><|assistant|>")
    assert second.parent is tree.nodes[0]
    assert (tree.num_branches, tree.num_mismatches) == (0, 0)


def test_rollouts_that_begin_alike_share_one_prompt_and_others_do_not() -> None:
    tokenizer = scripted_tokenizer()
    matcher = Matcher(tokenizer)
    trees = [TokenTree(tokenizer, matcher=matcher) for _ in range(3)]
    first, again = (tree.plan_chat([USER]) for tree in trees[:2])
    assert again is first and first.ids == tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    assert trees[2].plan_chat(talk("hi", "yo", "bye")).ids == tokenizer.encode(
        "<|user|>hi<|end|><|assistant|>yo<|end|><|user|>bye<|end|><|assistant|>"
    )
    answered(trees[0], tokenizer, first, "yo<|end|>")
    assert trees[0].plan_chat([USER]) is first, "asked once more: a second way on, from no turn"
    assert trees[0].plan_chat(talk("hi", "yo", "bye")).parent is trees[0].nodes[0]
    assert trees[1].plan_chat(talk("hi", "yo", "bye")).parent is None, "another session has no turns of the first"


def test_of_first_prompts_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.gateway.sessions.tree._MAX_KEPT", 2)
    tokenizer = scripted_tokenizer()
    matcher = Matcher(tokenizer)

    def planned(text: str) -> Prompt:
        return TokenTree(tokenizer, matcher=matcher).plan_chat(talk(text))

    first, second = planned("a"), planned("b")
    assert planned("a") is first, "asked again, so it is newer than b"
    planned("c")
    assert planned("a") is first and planned("b") is not second


def test_ids_that_text_would_not_give_are_kept(bpe_tokenizer: Tokenizer) -> None:  # noqa: F811
    """I4: a model may spell a word by other tokens than the tokenizer would."""
    tree = TokenTree(bpe_tokenizer)
    whole = bpe_tokenizer.encode("the")
    spelled = tuple(i for letter in "the" for i in bpe_tokenizer.encode(letter))
    assert len(whole) == 1 and len(spelled) == 3
    first = tree.plan_chat([USER])
    assert answered(tree, bpe_tokenizer, first, spelled + bpe_tokenizer.encode("<|im_end|>")) == "the"
    second = tree.plan_chat(talk("hi", "the", "more"))
    assert second.ids[: len(first.ids) + 3] == first.ids + spelled
    assert bpe_tokenizer.decode(second.ids) == second.text
    assert second.respelled and tree.num_mismatches == 0, "nothing was answered yet"
    answered(tree, bpe_tokenizer, second, "fox<|im_end|>", request=2)
    answered(tree, bpe_tokenizer, second, "dog<|im_end|>", request=2)
    assert tree.num_mismatches == 1, "one prompt, of whose choices there are two"


def test_after_a_cut_answer_the_templates_end_of_turn_is_context() -> None:
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    first = tree.plan_chat([USER])
    answered(tree, tokenizer, first, "abc")
    second = tree.plan_chat(talk("hi", "abc", "go"))
    answered(tree, tokenizer, second, "d<|end|>", request=2)
    (row,) = harvest(tree.nodes).rows
    assert tokenizer.decode(tuple(row.token_ids)) == "<|user|>hi<|end|><|assistant|>abc<|end|><|user|>go<|end|><|assistant|>d<|end|>"
    assert tokenizer.decode(tuple(row.token_ids[row.loss_mask])) == "abcd<|end|>"


def test_a_template_that_rewrites_history_starts_a_branch(bpe_tokenizer: Tokenizer) -> None:  # noqa: F811
    """The template cuts the thoughts of earlier turns, so the next prompt is not a continuation of the tokens."""
    tree = TokenTree(bpe_tokenizer)
    first = tree.plan_chat([USER])
    reply = answered(tree, bpe_tokenizer, first, "<think> the dog </think> fox<|im_end|>")
    second = tree.plan_chat(talk("hi", reply, "more"))
    assert second.parent is None
    assert "<think>" not in bpe_tokenizer.decode(second.ids)
    answered(tree, bpe_tokenizer, second, "dog<|im_end|>", request=2)
    assert (tree.num_branches, tree.num_rewritten) == (1, 1)
    result = harvest(tree.nodes)
    assert [bpe_tokenizer.decode(tuple(r.token_ids[r.loss_mask])) for r in result.rows] == [
        "<think> the dog </think> fox<|im_end|>",
        "dog<|im_end|>",
    ]


def test_two_ways_on_from_one_turn_train_its_tokens_once() -> None:
    """I3: the shared turn has mask 1 in the first row and is context in the second."""
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    answered(tree, tokenizer, tree.plan_chat([USER]), "A<|end|>", version=4)
    for request, text in ((2, "x"), (3, "y")):
        answered(tree, tokenizer, tree.plan_chat(talk("hi", "A", text)), text.upper() + "<|end|>", request=request, version=5)
    first, second = harvest(tree.nodes).rows
    assert tokenizer.decode(tuple(first.token_ids[first.loss_mask])) == "A<|end|>X<|end|>"
    assert tokenizer.decode(tuple(second.token_ids[second.loss_mask])) == "Y<|end|>"
    assert tokenizer.decode(tuple(second.token_ids[second.generated])) == "A<|end|>Y<|end|>"
    assert list(first.versions[first.loss_mask]) == [4, 4, 5, 5]
    assert list(first.logprobs[first.loss_mask]) == pytest.approx([0.0, -0.1, 0.0, -0.1])
    assert tree.num_branches == 1


def test_choices_that_were_not_continued_are_dropped_where_one_was() -> None:
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    prompt = tree.plan_chat([USER])
    for text in ("A<|end|>", "BB<|end|>", "C<|end|>"):
        answered(tree, tokenizer, prompt, text, request=1)
    assert len(harvest(tree.nodes).rows) == 3, "best of n in one turn: all count"
    answered(tree, tokenizer, tree.plan_chat(talk("hi", "BB", "on")), "D<|end|>", request=2)
    result = harvest(tree.nodes)
    assert [tokenizer.decode(tuple(r.token_ids[r.loss_mask])) for r in result.rows] == ["BB<|end|>D<|end|>"]
    assert result.dropped == {Reason.UNCHOSEN: 4}
    assert tree.num_branches == 0, "choices of one request are no branches"


def test_turns_not_sampled_from_the_policy_are_context_with_a_reason() -> None:
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    answered(tree, tokenizer, tree.plan_chat([USER]), "AB<|end|>", sampled=False)
    assert harvest(tree.nodes).rows == ()
    answered(tree, tokenizer, tree.plan_chat(talk("hi", "AB", "x")), "C<|end|>", request=2)
    result = harvest(tree.nodes)
    assert [tokenizer.decode(tuple(r.token_ids[r.loss_mask])) for r in result.rows] == ["C<|end|>"]
    assert result.masked == {Reason.NOT_POLICY_SAMPLED: 3}


@pytest.mark.parametrize("as_ids", [True, False])
def test_a_completion_that_goes_on_from_a_recorded_one_is_its_child(bpe_tokenizer: Tokenizer, as_ids: bool) -> None:  # noqa: F811
    tree = TokenTree(bpe_tokenizer)
    first = tree.plan_ids(bpe_tokenizer.encode("the quick")) if as_ids else tree.plan_text("the quick")
    spelled = tuple(i for letter in " fox" for i in bpe_tokenizer.encode(letter))
    answered(tree, bpe_tokenizer, first, spelled)
    second = tree.plan_ids(first.ids + spelled + bpe_tokenizer.encode(" dog")) if as_ids else tree.plan_text("the quick fox dog")
    assert second.parent is tree.nodes[0]
    assert second.ids == first.ids + spelled + bpe_tokenizer.encode(" dog")
    assert tree.plan_text("the lazy fox").parent is None


def test_empty_fields_and_split_texts_do_not_change_a_history() -> None:
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    answered(tree, tokenizer, tree.plan_chat([USER]), "A<|end|>")
    sent_back: Message = {"role": "assistant", "content": "A", "refusal": None, "tool_calls": [], "audio": None}
    in_parts: Message = {"role": "assistant", "content": [{"type": "text", "text": "A"}], "name": "x"}
    assert tree.plan_chat([USER, sent_back, USER]).parent is tree.nodes[0]
    assert digest(in_parts) == digest(sent_back) != digest({**sent_back, "content": "B"})


def test_a_row_has_the_experts_of_every_token_that_some_turn_recorded_first() -> None:
    """The first turn's last token is recorded by the second one, which has another record of what came before: that of the first stays."""
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)

    def recorded(prompt: Prompt, output: str, number: int) -> None:
        ids = tokenizer.encode(output)
        record = bytes([number, number] * (len(prompt.ids) + len(ids) - 1) + [255, 255])
        turn = Turn(prompt.ids, ids, (-0.1,) * len(ids), (Segment(0, 0, 0, len(ids)),), Finish(FinishReason.STOP), experts=record)
        tree.record(prompt, turn, reply=tokenizer.decode(ids, skip_special=True), request=number)

    recorded(first := tree.plan_chat([USER]), "yo<|end|>", 1)
    recorded(second := tree.plan_chat(talk("hi", "yo", "bye")), "A<|end|>", 2)
    (row,) = harvest(tree.nodes).rows
    before, whole = len(first.ids) + 3, len(second.ids) + 2
    assert row.experts is not None and row.experts.shape == (whole, 2)
    assert row.experts[:, 0].tolist() == [1] * (before - 1) + [2] * (whole - before) + [255]


def test_a_turn_keeps_its_older_keys_and_its_digest_covers_them() -> None:
    tokenizer = scripted_tokenizer()

    def recorded(*keys: OlderKeys) -> Node:
        tree = TokenTree(tokenizer)
        prompt = tree.plan_chat([USER])
        ids = tokenizer.encode("yo<|end|>")
        turn = Turn(prompt.ids, ids, (0.0,) * len(ids), (Segment(2, 1, 0, len(ids)),), Finish(FinishReason.STOP), older_keys=keys)
        tree.record(prompt, turn, reply="yo", request=1)
        (node,) = tree.nodes
        assert node.turn == turn
        assert read_conditions(harvest(tree.nodes).rows[0].records[0].conditions).older_keys == keys
        return node

    nodes = [recorded(), recorded(OlderKeys(0, ((1, 2), (2, 1)))), recorded(OlderKeys(0, ((1, 1), (2, 2))))]
    assert len({node.digest for node in nodes}) == 3
    assert nodes[0].conditions == msgspec.msgpack.encode((None, Finish(FinishReason.STOP), True)), "as in runs of before"


def test_a_row_of_turns_without_a_record_has_none() -> None:
    tokenizer = scripted_tokenizer()
    tree = TokenTree(tokenizer)
    answered(tree, tokenizer, tree.plan_chat([USER]), "yo<|end|>")
    assert harvest(tree.nodes).rows[0].experts is None
