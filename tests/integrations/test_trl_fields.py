"""Every field of trl's configurations, as its newest release has them, is mapped, refused with its remedy, or named as idle."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from from_trl import CLASSES, RECORD, differences, page, recorded
from tests.trainer.test_oracles import COMPOSED

from midflight.config.options import options
from midflight.errors import ConfigError
from midflight.integrations.trl import GRPOConfig
from midflight.integrations.trl.arguments import IDLE, MAPPED, REFUSED, default_of, meaning_of
from midflight.integrations.trl.losses import LOSS_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
THEIRS: dict[str, Any] = json.loads(RECORD.read_text())


def fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(CLASSES[name])}


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_trl_is_there_with_trls_default(name: str) -> None:
    beyond: frozenset[str] = getattr(CLASSES[name], "beyond_trl", frozenset())
    ours = {field: default_of(found) for field, found in fields(name).items() if field not in beyond}
    assert ours == THEIRS[name]


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_says_what_it_is_here(name: str) -> None:
    for field, found in fields(name).items():
        meaning = meaning_of(found)
        assert meaning.kind in (MAPPED, REFUSED, IDLE), field
        assert meaning or meaning.kind == IDLE, f"{field} is {meaning.kind} and does not say what it becomes"


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_of_all_fields_are_taken_without_a_word(name: str) -> None:
    config = CLASSES[name](**THEIRS[name])
    assert config.notes == [] and config.given == frozenset()


OTHERS: dict[type, Any] = {bool: True, int: 7, float: 0.25, str: "other", type(None): "other", list: ["other"]}


@pytest.mark.parametrize("name", CLASSES)
def test_a_refused_field_is_refused_by_its_name_with_its_own_remedy(name: str) -> None:
    for field, found in fields(name).items():
        meaning = meaning_of(found)
        if meaning.kind != REFUSED:
            continue
        default = default_of(found)
        other = not default if isinstance(default, bool) else OTHERS[type(default)]
        with pytest.raises(ConfigError) as caught:
            CLASSES[name](**{field: other})
        assert f"{field}={other!r}: {meaning}" in str(caught.value)


@pytest.mark.parametrize("name", CLASSES)
def test_a_field_without_effect_is_named_where_it_is_set(name: str) -> None:
    for field, found in fields(name).items():
        if meaning_of(found).kind == IDLE:
            default = default_of(found)
            other = not default if isinstance(default, bool) else OTHERS[type(default)]
            assert CLASSES[name](**{field: other}).notes == [f"{field}: accepted, and without effect here"]


@pytest.mark.parametrize("name", CLASSES)
def test_every_option_that_a_field_names_exists(name: str) -> None:
    known = {re.sub(r"\.\*.*", "", key) for key in options()}
    sections = {key.partition(".")[0] for key in known}
    for field, found in fields(name).items():
        for section, option in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", meaning_of(found)):
            assert section not in sections or f"{section}.{option}" in known, field


def test_a_field_that_a_script_sets_afterwards_is_looked_at_before_the_run() -> None:
    config = GRPOConfig()
    config.fp16 = True
    with pytest.raises(ConfigError, match=r"fp16=True: .*use bf16=True"):
        config.check()


def test_each_loss_names_the_comparison_with_trls_own_numbers() -> None:
    assert {loss.oracle for loss in LOSS_TYPES.values()} <= COMPOSED.keys()


def test_the_tables_of_the_page_are_current() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python tools/from_trl.py docs/from-trl.md"


def test_new_and_changed_fields_of_another_release_are_said_by_name() -> None:
    ours = {name: dict(THEIRS[name]) for name in CLASSES}
    theirs = {name: dict(THEIRS[name]) for name in CLASSES}
    theirs["GRPOConfig"]["gamma"] = 0.5
    theirs["GRPOConfig"]["epsilon"] = 0.3
    del theirs["AsyncGRPOConfig"]["token_budget"]
    assert list(differences(theirs, ours)) == [
        "GRPOConfig.epsilon is 0.3 and was 0.2",
        "GRPOConfig.gamma is new, with 0.5",
        "AsyncGRPOConfig.token_budget is gone",
    ]


@pytest.mark.skipif("MIDFLIGHT_TRL" not in os.environ, reason="MIDFLIGHT_TRL names no folder with trl: make newest-trl")
def test_the_newest_release_has_the_recorded_fields() -> None:
    assert list(differences(recorded(Path(os.environ["MIDFLIGHT_TRL"])), THEIRS)) == []
