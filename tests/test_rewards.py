"""The reward functions that come along, by hand."""

from __future__ import annotations

import pytest

from midflight import rewards
from midflight.errors import EnvironmentFailed


def test_exact_match_looks_past_white_space_and_past_case_where_it_is_told() -> None:
    assert rewards.exact_match(" Paris\n", "Paris") == 1.0
    assert (rewards.exact_match("paris", "Paris"), rewards.exact_match("paris", "Paris", ignore_case=True)) == (0.0, 1.0)
    assert rewards.exact_match("7", 7) == 1.0


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        ("so it is 1,234.50.", "1234.5", 1.0),
        ("2 + 3 makes 5", "#### 5", 1.0),
        ("5 is the answer, not 6", "5", 0.0),
        ("-3", "3", 0.0),
        ("−3", "-3", 1.0),
        ("1e3", 1000, 1.0),
        ("none", "3", 0.0),
        ("it is one-2", "-2", 1.0),
        ("the size3", "3", 1.0),
        ("e", "3", 0.0),
        ("about .5", "0.5", 1.0),
    ],
)
def test_number_match_compares_the_last_numbers(said: str, answer: object, expected: float) -> None:
    assert rewards.number_match(said, answer) == expected


def test_number_match_has_a_tolerance_and_i10_refuses_an_answer_without_a_number() -> None:
    assert (rewards.number_match("3.14", "3.1416"), rewards.number_match("3.14", "3.1416", tolerance=1e-2)) == (0.0, 1.0)
    with pytest.raises(EnvironmentFailed, match="'many', which holds no number"):
        rewards.number_match("3", "many")


def test_math_verify_compares_what_is_meant() -> None:
    pytest.importorskip("math_verify")
    assert rewards.math_verify(r"It is $\frac{2}{4}$.", r"\frac{1}{2}") == 1.0
    assert rewards.math_verify("It is $3$.", r"\boxed{4}") == 0.0


def test_json_schema_takes_an_object_or_its_text_and_i10_refuses_what_is_no_schema() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert rewards.json_schema('{"a": 1}', schema) == 1.0
    assert [rewards.json_schema(said, schema) for said in ('{"a": "1"}', "{}", "no json")] == [0.0, 0.0, 0.0]
    assert rewards.json_schema("3", '{"type": "integer"}') == 1.0
    with pytest.raises(EnvironmentFailed, match="is no JSON schema"):
        rewards.json_schema("3", {"type": "number of things"})


def test_matches_looks_anywhere_or_at_all_of_it_and_i10_refuses_what_is_no_pattern() -> None:
    assert (rewards.matches("say: 42!", r"\d+"), rewards.matches("say: 42!", r"\d+", whole=True)) == (1.0, 0.0)
    assert rewards.matches(" 42\n", r"\d+", whole=True) == 1.0
    with pytest.raises(EnvironmentFailed, match="is no regular expression"):
        rewards.matches("x", "(")


def test_length_is_a_penalty_that_grows_over_its_buffer() -> None:
    said = "one two three four five six"
    assert [rewards.length(said, most=most, buffer=4) for most in (6, 5, 4, 1)] == [0.0, -0.25, -0.5, -1.0]
    assert (rewards.length(said, most=5), rewards.length(said, most=6)) == (-1.0, 0.0)
