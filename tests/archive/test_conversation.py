"""A rollout read back from its tokens: messages, branches, and what is known of each token."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from midflight.archive.conversation import TokenUse, as_curl, as_json, as_shell, conversation_of
from midflight.archive.messages import MessageReader, as_chat
from midflight.archive.samples import in_words
from midflight.archive.store_reader import rollout_key
from midflight.errors import ModelNotFound, NoRun
from midflight.text.tokenizer import ChatTemplate, Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Finish, FinishReason, GroupKey, Reason, RolloutKey, Segment, Task, Turn
from midflight.types.facts import Admitted, TurnKept

from .stores import SAYS, Recorded

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|end|>'
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rewards 0 and 1: mean 0.5, deviation sqrt(0.5)."""


def test_what_the_agent_saw_is_read_back_from_what_is_trained(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        row = store.row(
            ("<|system|>Be brief.<|end|>" + SAYS.format(asked="Rain?"), False),
            (CALL, True),
            ("<|tool|>sunny<|end|><|assistant|>", False),
            ("No.<|end|>", True),
        )
        store.group(0, (1.0,), rows={0: (row,)})
    seen = conversation_of(tmp_path, rollout_key("0-0-0-0"))
    assert seen.chat() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_0", "name": "weather"},
        {"role": "assistant", "content": "No."},
    ]
    (branch,) = seen.branches
    assert (
        "".join(branch.pieces)
        == "<|system|>Be brief.<|end|>" + SAYS.format(asked="Rain?") + CALL + "<|tool|>sunny<|end|><|assistant|>No.<|end|>"
    )
    assert [(m.begin, m.end) for m in branch.messages][1:] == [
        (m.end, n.end) for m, n in zip(branch.messages, branch.messages[1:], strict=False)
    ]
    assert branch.messages[-1].end == len(branch.pieces)


def test_each_token_has_its_version_age_advantage_and_use(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.train(store.group(0, (0.0, 1.0)), version=1)
    (branch,) = conversation_of(tmp_path, rollout_key("0-0-0-1")).branches
    wrote = branch.row.generated
    assert set(branch.uses) == {TokenUse.READ, TokenUse.TRAINED}
    assert np.array_equal(branch.ages >= 0, wrote)
    assert branch.ages[wrote].tolist() == [0] * int(wrote.sum())
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert branch.advantages[wrote] == pytest.approx(expected)
    assert np.isnan(branch.advantages[~wrote]).all()


def test_entropy_is_estimated_by_the_mean_of_minus_log_p(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (1.0,), rows={0: (store.row(("<|user|>a<|end|><|assistant|>", False), ("bc<|end|>", True)),)})
    (branch,) = conversation_of(tmp_path, rollout_key("0-0-0-0")).branches
    assert branch.entropies[-3:] == pytest.approx([(0.4 + 0.5 + 0.6) / 3] * 3)


def test_branches_say_what_they_share_and_where_a_token_is_trained(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        asked = (SAYS.format(asked="x"), False)
        first = store.row(asked, ("one<|end|>", True), ("<|user|>more<|end|><|assistant|>", False), ("two<|end|>", True))
        second = store.row(asked, ("one<|end|>", True), ("<|user|>else<|end|><|assistant|>", False), ("six<|end|>", True), untrained=(1,))
        store.group(0, (1.0, 0.0), rows={0: (first, second)})
    one, two = conversation_of(tmp_path, rollout_key("0-0-0-0")).branches
    assert one.shared == 0
    assert "".join(two.pieces[: two.shared]) == SAYS.format(asked="x") + "one<|end|><|user|>"
    begin, end = len(store.tokenizer.encode(asked[0])), len(store.tokenizer.encode(asked[0] + "one<|end|>"))
    assert set(one.uses[begin:end]) == {TokenUse.WAITING}
    assert set(two.uses[begin:end]) == {TokenUse.ELSEWHERE}


def test_tokens_of_a_dropped_group_and_of_a_failure_say_why(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.drop(store.group(0, (1.0, 1.0, None), error="OSError: no"), Reason.ZERO_SPREAD)
    for sample, why in ((0, Reason.ZERO_SPREAD), (2, Reason.NO_REWARD)):
        (branch,) = conversation_of(tmp_path, RolloutKey(GroupKey(0, 0), sample)).branches
        assert set(branch.uses) == {TokenUse.READ, why}


def test_a_rollout_that_goes_on_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        prompt, said = (store.tokenizer.encode(text) for text in (SAYS.format(asked="x"), "one<|end|>"))
        key = GroupKey(0, 0)
        store.apply(Admitted(key, Task("task-0", "letters", {})))
        made = Turn(prompt, said, (-0.5,) * len(said), (Segment(3, 3, 0, len(said)),), Finish(FinishReason.STOP))
        store.apply(TurnKept(RolloutKey(key, 0), 0, made))
    seen = conversation_of(tmp_path, rollout_key("0-0-0-0"))
    assert seen.rollout is None
    assert [message["content"] for message in seen.chat()] == ["x", "one"]
    assert seen.branches[0].row.versions[seen.branches[0].row.generated].tolist() == [3] * len(said)
    assert "not ended" in in_words(seen)


def test_it_can_be_taken_along_as_json_as_a_request_and_as_a_script(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (1.0,), said="it's fine")
    seen = conversation_of(tmp_path, rollout_key("0-0-0-0"))
    taken = json.loads(json.dumps(as_json(seen)))
    assert taken["messages"][-1] == {"role": "assistant", "content": "it's fine"}
    assert len(taken["branches"][0]["logprob"]) == len(taken["branches"][0]["token_ids"])
    body = as_curl(seen).partition(" -d ")[2].strip("'")
    assert json.loads(body) == {"model": "midflight", "messages": [{"role": "user", "content": "question 0"}]}  # as long as there is room
    assert f"midflight serve --model {tmp_path}/start" in as_shell(seen, tmp_path)


def test_it_is_printed_with_its_reward_and_the_fates_of_its_tokens(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (0.5,), said="fine")
    assert in_words(conversation_of(tmp_path, rollout_key("0-0-0-0"))).splitlines() == [
        "0-0-0-0: letters, task task-0, reward 0.500 (right 0.500); waits for a step",
        "  > question 0",
        "  < fine",
        "  tokens: 13 read, 5 waiting",
    ]


def test_a_rollout_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (0.5,))
    with pytest.raises(NoRun, match="no rollout 0-7-0-0"):
        conversation_of(tmp_path, rollout_key("0-7-0-0"))


def test_without_the_tokenizer_it_is_said_what_is_missing(tmp_path: Path) -> None:
    Store(tmp_path / "store.sqlite", run="tests").close()
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json does not exist"):
        MessageReader.of_run(tmp_path)


@pytest.mark.parametrize(("template", "roles"), [(CHATML, ["user", "assistant"]), (None, ["user", "assistant"])])
def test_other_templates_are_read_by_their_own_marks_and_none_by_who_wrote(tmp_path: Path, template: str | None, roles: list[str]) -> None:
    with Recorded(tmp_path) as store:
        own = Tokenizer(store.tokenizer.backend, template=template and ChatTemplate(template, {}), eos_token_ids=frozenset())
        begins = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" if template else "hello"
        row = store.row((begins, False), ("hi" + ("<|im_end|>" if template else ""), True))
    reader = MessageReader(own)
    said = reader.messages(row.token_ids, row.generated, reader.pieces(row.token_ids))
    assert [message.role for message in said] == roles
    assert as_chat(said)[0] == {"role": "user", "content": "hello"}
