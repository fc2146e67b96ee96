"""Tasks from reasoning-gym: real entries, split by content, and clear words about what cannot be drawn."""

from __future__ import annotations

import builtins
import time

import pytest
import reasoning_gym

from midflight.config.sources import SourceSection
from midflight.environments.reasoning_gym import draw_tasks
from midflight.environments.sources import load_sources
from midflight.errors import ConfigError
from midflight.types import Task

WORDS = {"min_word_len": 3, "max_word_len": 7}


def words(tasks: tuple[Task, ...]) -> list[str]:
    return [task.data["metadata"]["word"] for task in tasks]  # type: ignore[index,call-overload]


@pytest.fixture(scope="module")
def spelling():
    return draw_tasks("spell_backward", size=4000, heldout=256, content="word", options=WORDS, seed=0)


def test_no_word_of_a_held_out_task_occurs_in_training(spelling):
    training, heldout = words(spelling.training), words(spelling.heldout)
    assert (len(training), len(heldout)) == (4000, 256)
    assert not {w.casefold() for w in training} & {w.casefold() for w in heldout}
    assert len(set(training)) == 4000 and len(set(heldout)) == 256


def test_seeds_alone_would_not_have_separated_them():
    def drawn(seed: int, size: int) -> set[str]:
        dataset = reasoning_gym.create_dataset("spell_backward", seed=seed, size=size, **WORDS)
        return {dataset[i]["metadata"]["word"] for i in range(size)}

    assert drawn(1, 256) <= drawn(0, 4000)


def test_drawing_is_deterministic_and_follows_the_seed(spelling):
    again = draw_tasks("spell_backward", size=4000, heldout=256, content="word", options=WORDS, seed=0)
    assert again == spelling
    other = draw_tasks("spell_backward", size=100, heldout=100, content="word", options=WORDS, seed=1)
    assert words(other.training) != words(spelling.training)[:100]


def test_what_is_held_out_stays_so_when_the_numbers_change(spelling):
    small = draw_tasks("spell_backward", size=50, heldout=400, content="word", options={"min_word_len": 5, "max_word_len": 5}, seed=0)
    assert not {w.casefold() for w in words(small.training)} & {w.casefold() for w in words(spelling.heldout)}
    assert not {w.casefold() for w in words(small.heldout)} & {w.casefold() for w in words(spelling.training)}


def test_letter_case_does_not_separate():
    drawn = draw_tasks("spell_backward", size=1000, heldout=140, content="word", options={"min_word_len": 3, "max_word_len": 3}, seed=0)
    every = words(drawn.training) + words(drawn.heldout)
    assert len({w.casefold() for w in every}) < len(every), "this list should hold a word in two letter cases"
    assert not {w.casefold() for w in words(drawn.training)} & {w.casefold() for w in words(drawn.heldout)}


def test_four_thousand_tasks_take_less_than_a_second():
    draw_tasks("spell_backward", size=1, heldout=0)
    started = time.process_time()
    draw_tasks("spell_backward", size=4000, heldout=256, options=WORDS)
    assert time.process_time() - started < 1


def test_a_task_holds_formatted_question_answer_dataset_and_metadata():
    drawn = draw_tasks("spell_backward", size=3, heldout=0, prompt="backward: {word} ({word_len})", source="spelling")
    for task in drawn.training:
        word = task.data["metadata"]["word"]  # type: ignore[index,call-overload]
        assert task.data["question"] == f"backward: {word} ({len(word)})"
        assert (task.data["answer"], task.data["dataset"], task.source) == (word[::-1], "spell_backward", "spelling")
    assert len({task.id for task in drawn.training}) == 3


def test_an_arithmetic_dataset_is_split_by_its_expression():
    drawn = draw_tasks("chain_sum", size=300, heldout=40, prompt="{expression} =", content="expression", options={"max_terms": 3})
    training, heldout = ({t.data["question"] for t in tasks} for tasks in (drawn.training, drawn.heldout))
    assert (len(training), len(heldout)) == (300, 40) and not training & heldout


ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_too_few_distinct_contents_are_reported_with_the_number_there_is():
    with pytest.raises(ConfigError, match=r"size = 5000 and heldout = 40, but only (\d+) distinct values of 'question'") as caught:
        draw_tasks("chain_sum", size=5000, heldout=40, options=ONE_DIGIT)
    available = int(str(caught.value).split("lower size to ")[1].split(",")[0])
    drawn = draw_tasks("chain_sum", size=available, heldout=40, options=ONE_DIGIT)
    assert (len(drawn.training), len(drawn.heldout)) == (available, 40) and available > 100
    assert not drawn.training_contents & drawn.heldout_contents
    with pytest.raises(ConfigError, match="lower heldout and size"):
        draw_tasks("chain_sum", size=1, heldout=5000, options=ONE_DIGIT)


def test_a_small_dataset_can_be_split_in_any_proportion():
    drawn = draw_tasks("chain_sum", size=20, heldout=120, options=ONE_DIGIT)
    assert (len(drawn.training), len(drawn.heldout)) == (20, 120)
    questions = [{t.data["question"] for t in tasks} for tasks in (drawn.training, drawn.heldout)]
    assert not questions[0] & questions[1]
    assert draw_tasks("chain_sum", size=20, heldout=0, options=ONE_DIGIT).heldout == ()


def test_two_sources_of_one_small_dataset_that_cannot_be_kept_apart_are_refused():
    sections = [
        SourceSection(dataset="chain_sum", size=size, heldout=heldout, options=ONE_DIGIT) for size, heldout in ((20, 120), (120, 20))
    ]
    with pytest.raises(ConfigError, match="would train on"):
        load_sources(sections, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "spel_backward"}, "'spel_backward' is not a dataset of reasoning-gym. Did you mean 'spell_backward'"),
        ({"options": {"min_word_length": 3}}, "no option 'min_word_length'. Did you mean 'min_word_len'"),
        ({"options": {"min_word_len": -1}}, 'refuses options {"min_word_len": -1}: AssertionError: min_word_len must be positive'),
        ({"options": {"min_word_len": "three"}}, 'refuses options {"min_word_len": "three"}: TypeError'),
        ({"options": {"seed": 3}}, "option 'seed' of dataset 'spell_backward' is set by the source itself"),
        ({"prompt": "spell {wrod}"}, "names the unknown field 'wrod'; known: answer, difficulty, question"),
        ({"prompt": "spell {}"}, "names the unknown field ''"),
        ({"prompt": "spell {word"}, "is not a format"),
        ({"content": "wrod"}, "content = 'wrod' is not a field of its entries. Did you mean 'word'"),
    ],
)
def test_what_is_wrong_in_a_source_is_named(arguments: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        draw_tasks(**{"dataset": "spell_backward", "size": 5, "heldout": 0, **arguments})
    assert message in str(caught.value)


def test_a_missing_package_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'midflight\[reasoning-gym\]'"):
        draw_tasks("spell_backward", size=1, heldout=0)


def test_sources_keep_apart_what_is_held_out_even_of_one_dataset_named_twice():
    sections = [
        SourceSection(dataset="spell_backward", size=400, heldout=50, content="word", options={"min_word_len": low, "max_word_len": 7})
        for low in (3, 5)
    ]
    first, second = load_sources(sections, seed=0)
    assert (first.name, second.name) == ("spell_backward", "spell_backward-2")
    assert {task.source for task in second.training + second.heldout} == {"spell_backward-2"}
    training = {w.casefold() for w in words(first.training + second.training)}
    assert not training & {w.casefold() for w in words(first.heldout + second.heldout)}


def test_only_contents_that_match_the_pattern_become_tasks() -> None:
    drawn = draw_tasks("spell_backward", size=500, heldout=50, content="word", only="[a-z]+", options=WORDS, seed=0)
    assert all(word.islower() for word in drawn.training_contents | drawn.heldout_contents)
    words = [task.data["metadata"]["word"] for task in (*drawn.training, *drawn.heldout)]  # type: ignore[index, call-overload]
    assert all(word.islower() for word in words), "contents are kept in small letters, the words as they are"


def test_a_bad_pattern_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sources.only = '\[a-z'"):
        draw_tasks("spell_backward", size=5, heldout=1, content="word", only="[a-z", options=WORDS, seed=0)
