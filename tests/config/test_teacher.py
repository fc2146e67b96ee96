"""A teacher that could not score the student's tokens is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.config.derived import computing_threads, model_sizes, num_engines, placement
from midflight.config.memory import memory_estimate
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.run.launcher.checks.model import check_teacher
from midflight.text.byte_tokenizer import write_byte_tokenizer

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def make(name: str = "teacher", *, vocab_size: int = 262) -> Path:
        made = tmp_path / name
        made.mkdir()
        write_byte_tokenizer(made)
        sizes = {"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
        (made / "config.json").write_text(json.dumps(sizes))
        return made

    return make


def test_a_teacher_of_the_same_tokens_is_accepted_beside_a_made_student_and_a_given_one(folder: Folder) -> None:
    teacher = folder()
    check_teacher(load_config(None, [f"distillation.teacher={teacher}"]))
    check_teacher(load_config(None, [f"distillation.teacher={teacher}", f"model.path={folder('student')}"]))
    check_teacher(load_config(None))


def test_a_smaller_vocabulary_is_refused_by_both_sizes_and_a_padded_one_accepted(folder: Folder) -> None:
    check_teacher(load_config(None, [f"distillation.teacher={folder(vocab_size=320)}"]))
    student = folder("student", vocab_size=320)
    with pytest.raises(ConfigError, match="a vocabulary of 262 tokens, fewer than the student's 320"):
        check_teacher(load_config(None, [f"distillation.teacher={folder('small')}", f"model.path={student}"]))


def test_another_tokenizer_of_the_same_size_is_refused_by_the_first_token_that_differs(folder: Folder) -> None:
    teacher = folder()
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (40, 41))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"another tokenizer.*as token 40"):
        check_teacher(load_config(None, [f"distillation.teacher={teacher}"]))


def test_a_folder_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distillation\.teacher is .*nowhere"):
        check_teacher(load_config(None, [f"distillation.teacher={tmp_path / 'nowhere'}"]))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["distillation.rewards=false"], "leaves nothing to learn from; name a teacher"),
        (
            ["distillation.rewards=false", "distillation.teacher=x", "distillation.weight=0"],
            "leaves nothing to learn from; raise the weight",
        ),
        (["distillation.rewards=false", "distillation.teacher=x", "rollout.drop_zero_spread=true"], "chooses groups by their rewards"),
    ],
)
def test_options_that_leave_nothing_to_learn_from_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(None, overrides)


def test_the_teacher_is_one_more_process_and_no_engine(folder: Folder) -> None:
    alone, config = load_config(None), load_config(None, [f"distillation.teacher={folder()}"])
    assert [p.process for p in placement(config)] == ["launcher", "rollout", "engine", "teacher", "trainer"]
    assert computing_threads(config) == computing_threads(alone) + 1 and num_engines(config.engine) == 1
    assert teacher_bytes(config) > 320 * 2**20


def test_memory_counts_what_a_teacher_scores_with(folder: Folder) -> None:
    """Of a batch of 128 rows of 256 tokens it takes 2048 tokens at once, with 262 logits each, which are there twice: as logits and as their
    log-softmax; by another temperature than 1 also as they are divided by it. A vocabulary of 65,536 has at most 2**26 of them at once."""
    small, large = folder(), folder("large", vocab_size=65_536)

    def logits(teacher: Path, temperature: str) -> int:
        config = load_config(None, [f"distillation.teacher={teacher}", f"environment.temperature={temperature}"])
        (item,) = (item for item in memory_estimate(config, model_sizes(config.model)) if item.where == "teacher" and "logits" in item.what)
        return item.num_bytes

    assert logits(small, "1") == 2 * 4 * 2048 * 262
    assert logits(small, "0.5") == 3 * 4 * 2048 * 262
    assert logits(large, "1") == 2 * 4 * 2**26


def test_memory_counts_the_tokens_that_the_launcher_compares(folder: Folder) -> None:
    """Measured: 48 MB for twice 49,152 of them."""
    teacher = folder(vocab_size=49_152)
    student = folder("student", vocab_size=49_152)

    def launcher(*overrides: str) -> int:
        config = load_config(None, [f"model.path={student}", *overrides])
        return sum(item.num_bytes for item in memory_estimate(config, model_sizes(config.model)) if item.where == "launcher")

    assert launcher(f"distillation.teacher={teacher}") - launcher() == pytest.approx(48e6, rel=0.05)


def teacher_bytes(config: Config) -> int:
    return sum(item.num_bytes for item in memory_estimate(config, model_sizes(config.model)) if item.where == "teacher")
