"""Learning from conversations: what of them is learnt, behind which prompt, and what is wrong with a broken one."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.config import load_config
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.errors import ConfigError
from midflight.models.creation import make_model
from midflight.models.load import load_model, save_model
from midflight.models.names import named_tensors
from midflight.run.parts import WarmStart
from midflight.run.trainer.conversations import Conversations
from midflight.run.trainer.warm_start import SCREENED, Accuracy, WarmStartData, warm_start, warm_start_data
from midflight.text.byte_tokenizer import END, write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.supervised import SupervisedTrainer

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


def call(a: int) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": a}}}]}


def with_a_tool(a: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{a}?"}, call(a), {"role": "tool", "content": "7"}, {"role": "assistant", "content": "seven"}]
    return {"messages": messages, "tools": [ADD]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_tokenizer(tmp_path / "model")
    return Tokenizer.load(tmp_path / "model")


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_message_of_the_assistant_is_learnt_behind_what_an_engine_would_be_sent(tmp_path: Path, tokenizer: Tokenizer) -> None:
    read = Conversations(written(tmp_path / "c.jsonl", with_a_tool(3)), tokenizer, max_tokens=1000)
    (first, called), (second, said) = read.turns(0)
    messages = with_a_tool(3)["messages"]
    assert tokenizer.decode(first) == tokenizer.render(messages[:1], tools=[ADD], add_generation_prompt=True)
    assert tokenizer.decode(called) == '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|end|>' and called[-1] == END
    assert tokenizer.decode(second) == tokenizer.render(messages[:3], tools=[ADD], add_generation_prompt=True)
    assert tokenizer.decode(said) == "seven<|end|>"


def test_tools_may_be_a_text_of_json_and_arguments_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = with_a_tool(3)
    text = {"messages": [row["messages"][0], {**call(3), "content": None}], "tools": json.dumps([ADD])}
    text["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": '{"a": 3}'}}]
    read = Conversations(written(tmp_path / "c.jsonl", row, text), tokenizer, max_tokens=1000)
    assert read.turns(0)[0] == read.turns(1)[0]


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat": []}, "expected a list of messages in column 'messages', got null; there are chat"),
        ({"messages": [USER]}, "there is no message of the assistant behind another one"),
        ({"messages": [{"content": "a"}]}, 'message 0 is {"content": "a"}; give it a role'),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "message 1 has content 3; give it a text"),
        ({"messages": [USER, {**call(1), "tool_calls": [{"name": "add"}]}]}, "message 1 has tool_calls"),
        ({"messages": [USER, call(1)], "tools": "add"}, "column 'tools' is a text that is not JSON"),
        ({"messages": [USER, call(1)], "tools": ["add"]}, "column 'tools' holds [\"add\"]"),
        ({"messages": [USER, {"role": "assistant", "content": "b" * 99}]}, "message 1 ends at token 104, and model.max_context is 90"),
        ({"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}, "unknown role robot"),
        ("{", "expected a JSON object"),
    ],
)
def test_a_broken_conversation_is_named_by_file_and_line(tmp_path: Path, tokenizer: Tokenizer, row: object, message: str) -> None:
    sound = {"messages": [USER, {"role": "assistant", "content": "b"}]}
    read = Conversations(written(tmp_path / "c.jsonl", sound, row), tokenizer, max_tokens=90)
    with pytest.raises(ConfigError) as caught:
        read.check(seconds=10)
    assert str(caught.value).startswith(f"{tmp_path}/c.jsonl:2: ") and message in str(caught.value)


def test_no_conversation_is_both_learnt_and_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [with_a_tool(i % 20) for i in range(40)]
    read = Conversations(written(tmp_path / "c.jsonl", *rows), tokenizer, max_tokens=1000)
    learnt, apart = read.split(seed=0, every=8)
    assert (len(apart), len(learnt)) == (3, 34), "twenty conversations, each twice: three are held out, once each"
    assert not {i % 20 for i in learnt} & {i % 20 for i in apart}
    assert read.split(seed=0, every=0) == (range(40), ())
    with pytest.raises(ConfigError, match="none of which would be left"):
        Conversations(written(tmp_path / "one.jsonl", with_a_tool(1)), tokenizer, max_tokens=1000).split(seed=0, every=8)


def test_a_model_learns_the_form_of_a_conversation_until_the_accuracy_is_reached(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "ok"}]} for i in range(64)]
    data = written(tmp_path / "c.jsonl", *rows)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 64}
    save_model(make_model(vocab_size=262, seed=0, dtype="float32", **sizes), tmp_path / "model")
    overrides = ["data=" + str(data), "target_accuracy=0.9", "evaluate_every=10", "max_steps=200", "learning_rate=0.01"]
    config = load_config(None, [*(f"warm_start.{text}" for text in overrides), "model.max_context=64", "engine.max_running=8"])
    lessons = warm_start_data(config, tokenizer)
    assert len(lessons.heldout) == 8 and not set(lessons.heldout) & set(islice(lessons.examples, 56))
    told: list[WarmStart] = []
    asyncio.run(warm_start(load_model(tmp_path / "model", dtype="float32", device="cpu"), lessons, config, told.append))
    assert told[-1].accuracy is not None and told[-1].accuracy >= 0.9 and told[-1].step < 200


def test_a_step_learns_from_as_many_answers_as_the_option_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 64}
    model = make_model(vocab_size=262, seed=0, dtype="float32", **sizes)
    config = load_config(None, ["warm_start.data=c.jsonl", "warm_start.max_steps=3", "warm_start.examples_per_step=5"])
    examples = iter([((i,), (i + 1,)) for i in range(100)])
    asyncio.run(warm_start(model, WarmStartData(tokenizer, examples, []), config, lambda told: None))
    assert next(examples) == ((15,), (16,)), "three steps of five"


@pytest.mark.parametrize(("target", "asked"), [(0.9, SCREENED), (0.1, 100)])
def test_where_the_first_examples_are_far_below_the_target_the_others_are_not_tried(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, target: float, asked: int
) -> None:
    tried: list[int] = []
    generate = EmbeddedEngine.generate_all
    monkeypatch.setattr(EmbeddedEngine, "generate_all", lambda engine, requests: tried.append(len(requests)) or generate(engine, requests))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 16}
    examples = [((65, 66 + number % 20), (67, 68, END)) for number in range(100)]
    config = load_config(None, [f"warm_start.target_accuracy={target}", "environment.max_tokens=3", "model.max_context=16"])
    accuracy = Accuracy(
        make_model(vocab_size=262, seed=0, dtype="float32", **sizes), WarmStartData(tokenizer, iter(examples), examples), config
    )
    accuracy.take()
    assert accuracy.measure(seed=1) == 0 and sum(tried) == asked


def test_the_model_that_comes_out_is_the_one_that_was_measured_although_steps_went_on(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 16}
    model = make_model(vocab_size=262, seed=0, dtype="float32", **sizes)
    examples = [((65, 66), (67, 68, END))] * 8
    weights: list[dict[str, torch.Tensor]] = []
    went_on, step, found = threading.Event(), SupervisedTrainer.step, iter([0.2, 0.6])

    def stepped(trainer: SupervisedTrainer, batch: Any) -> float:
        loss = step(trainer, batch)
        weights.append({name: tensor.clone() for name, tensor in named_tensors(trainer.model).items()})
        if len(weights) == 6:
            went_on.set()
        return loss

    def measured(*_: object, **__: object) -> float:
        accuracy = next(found)
        assert accuracy < 0.5 or went_on.wait(30), "the steps wait for the measurement"
        return accuracy

    monkeypatch.setattr(SupervisedTrainer, "step", stepped)
    monkeypatch.setattr(Accuracy, "measure", measured)
    config = load_config(None, ["warm_start.target_accuracy=0.5", "warm_start.evaluate_every=2", "environment.max_tokens=3"])
    told: list[WarmStart] = []
    asyncio.run(warm_start(model, WarmStartData(tokenizer, cycle(examples), examples), config, told.append))
    assert told[-1].accuracy == 0.6
    assert all(tensor.equal(weights[3][name]) for name, tensor in named_tensors(model).items()), "of step 4, the second that was measured"
    assert len(weights) >= 6 and not all(tensor.equal(weights[3][name]) for name, tensor in weights[-1].items())
