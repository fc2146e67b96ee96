"""Reward functions for `[[environment.rewards]]`, such as `entry =
"midflight.rewards:exact_match"`.

Each compares the last answer as text. Further arguments come from `options`, or from the task's
columns of the same name.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from midflight.errors import ConfigError, EnvironmentFailed

_NUMBER = re.compile(r"[-+−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, answer: object, *, ignore_case: bool = False) -> float:
    """1 if the completion is the answer, ignoring whitespace around both; else 0."""
    said = completion.strip()
    expected = str(answer).strip()
    if ignore_case:
        said = said.lower()
        expected = expected.lower()
    return float(said == expected)


def number_match(completion: str, answer: object, *, tolerance: float = 1e-6) -> float:
    """1 if the last number in the completion is the last one in the answer, within a relative and
    absolute tolerance; else 0.

    Raises `EnvironmentFailed` if the answer holds no number. That is the data's fault, because no
    completion could be right.
    """
    expected = _last_number(str(answer))
    if expected is None:
        raise EnvironmentFailed(
            f"number_match: the task's answer is {answer!r:.200}, which holds no number; use "
            "another reward for it."
        )
    said = _last_number(completion)
    if said is None:
        return 0.0
    return float(abs(said - expected) <= tolerance * max(1.0, abs(expected)))


def math_verify(completion: str, answer: object) -> float:
    """1 if the package math-verify finds both equal, as LaTeX or as expressions; else 0."""
    try:
        from math_verify import parse, verify

        deadline: Any = None  # its own deadlines want the main thread; the rollout's holds here
    except ImportError as error:
        raise ConfigError(
            "midflight.rewards:math_verify needs the package math-verify; install it with: pip "
            "install 'midflight[math]'."
        ) from error
    text = str(answer)
    if "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    expected = parse(text, parsing_timeout=deadline)
    if not expected:
        raise EnvironmentFailed(
            f"math_verify: the task's answer is {answer!r:.200}, which is no expression; use "
            "another reward for it."
        )
    said = parse(completion, parsing_timeout=deadline)
    return float(verify(expected, said, timeout_seconds=deadline))


def json_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """1 if the completion is JSON that matches the schema; else 0. The schema is an object or its
    JSON text.
    """
    try:
        found = json.loads(completion)
    except ValueError:
        return 0.0
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return float(_validator(text).is_valid(found))


def matches(completion: str, pattern: str, *, whole: bool = False) -> float:
    """1 if the regular expression is found in the completion; else 0. With `whole` it must match
    the whole completion, without the whitespace around it.
    """
    compiled = _compiled(pattern)
    match = compiled.fullmatch(completion.strip()) if whole else compiled.search(completion)
    return float(match is not None)


def length(completion: str, *, most: int, buffer: int = 0) -> float:
    """A penalty for length. It is 0 up to `most` words, and falls to -1 over the next `buffer`
    words.
    """
    over = len(completion.split()) - most
    if over <= 0:
        return 0.0
    if not buffer:
        return -1.0
    return -min(1.0, over / buffer)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise EnvironmentFailed(
            f"matches: {pattern!r} is no regular expression: {error}; mend the option or the "
            "column `pattern`."
        ) from error


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise ConfigError(
            "midflight.rewards:json_schema needs the package jsonschema; install it with: pip "
            "install 'midflight[schema]'."
        ) from error
    try:
        parsed = cast("dict[str, Any]", json.loads(schema))
        kind = validator_for(parsed)
        kind.check_schema(parsed)
    except (ValueError, SchemaError) as error:
        raise EnvironmentFailed(
            f"json_schema: {schema:.200} is no JSON schema: {error}; mend the option or the column "
            "`schema`."
        ) from error
    return kind(parsed)
