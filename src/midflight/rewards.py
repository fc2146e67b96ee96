"""Reward functions to be named in `[[environment.rewards]]`, such as `entry =
"midflight.rewards:exact_match"`.

Each compares the last answer as text. Further arguments come from `options`, or from columns of the
task of the same name.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from midflight.errors import ConfigError, EnvironmentFailed

_NUMBER = re.compile(r"[-+−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, answer: object, *, ignore_case: bool = False) -> float:
    """1 if the completion is the answer, but for white space around either; else 0."""
    said = completion.strip()
    expected = str(answer).strip()
    return float(said.lower() == expected.lower() if ignore_case else said == expected)


def number_match(completion: str, answer: object, *, tolerance: float = 1e-6) -> float:
    """1 if the last number in the completion is the last one in the answer, within a relative and
    absolute tolerance; else 0.

    `EnvironmentFailed` if the answer holds no number: that is the data's fault, and no completion
    could be right.
    """
    expected = _last_number(str(answer))
    if expected is None:
        raise EnvironmentFailed(
            f"number_match: the task's answer is {answer!r:.200}, which holds no number; use "
            "another reward for it."
        )
    said = _last_number(completion)
    return float(said is not None and abs(said - expected) <= tolerance * max(1.0, abs(expected)))


def math_verify(completion: str, answer: object) -> float:
    """1 if both mean the same as LaTeX or as expressions, as the package math-verify judges; else
    0.
    """
    try:
        from math_verify import parse, verify

        deadline: Any = None  # its own deadlines want the main thread; the rollout's holds here
    except ImportError as error:
        raise ConfigError(
            "midflight.rewards:math_verify needs the package math-verify; install it with: pip "
            "install 'midflight[math]'."
        ) from error
    text = str(answer)
    expected = parse(
        text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=deadline
    )
    if not expected:
        raise EnvironmentFailed(
            f"math_verify: the task's answer is {answer!r:.200}, which is no expression; use "
            "another reward for it."
        )
    return float(
        verify(expected, parse(completion, parsing_timeout=deadline), timeout_seconds=deadline)
    )


def json_schema(completion: str, schema: Mapping[str, Any] | str) -> float:
    """1 if the completion is JSON that the schema allows, which is an object or its text; else
    0.
    """
    try:
        found = json.loads(completion)
    except ValueError:
        return 0.0
    return float(
        _validator(schema if isinstance(schema, str) else json.dumps(schema)).is_valid(found)
    )


def matches(completion: str, pattern: str, *, whole: bool = False) -> float:
    """1 if the regular expression is found in the completion, or is all of it with `whole`; else
    0.
    """
    compiled = _compiled(pattern)
    return float(
        (compiled.fullmatch(completion.strip()) if whole else compiled.search(completion))
        is not None
    )


def length(completion: str, *, most: int, buffer: int = 0) -> float:
    """0 up to `most` words, then falling to -1 over the next `buffer` of them, as a penalty."""
    over = len(completion.split()) - most
    return 0.0 if over <= 0 else -min(1.0, over / buffer if buffer else 1.0)


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
