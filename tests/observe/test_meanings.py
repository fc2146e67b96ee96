"""Every number has a meaning beside its definition, and the page says it."""

from __future__ import annotations

import inspect
import re
import runpy
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from tests.observe.test_observers import tell_everything

from midflight.integrations.trl.metrics import SAME
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.observe.metrics import metrics_of
from midflight.observe.prometheus import Metrics
from midflight.observe.status import TRAINER_KEYS, LearningStatus, Totals
from midflight.observe.summary import Summary
from midflight.types import Accounts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
TOOL = runpy.run_path(str(ROOT / "tools" / "metrics.py"))


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of the page, one for each of the names that share a row."""
    below = PAGE.read_text().partition(f"\n{heading}\n")[2]
    lines = list(takewhile(bool, dropwhile(lambda line: not line.startswith("|"), below.splitlines())))
    assert lines, heading
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return [[name, meaning] for names, meaning in rows for name in re.findall(r"(?:^|, )`([^`]+)`", names)]


MEANINGS = dict(table("## Names for dashboards"))


def meaning_of(name: str) -> str | None:
    """The name in the table that is meant: the same, or the first with placeholders that fits. A name's last placeholder may stand for blanks and
    slashes, earlier ones may not."""
    for known in sorted(MEANINGS, key=lambda known: "<" in known):
        first, *others = [re.escape(part) for part in re.split(r"<\w+>", known)]
        pattern = "[^/]+".join([first, *others[:-1]]) + ".+" + others[-1] if others else first
        if re.fullmatch(pattern, name):
            return known
    return None


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == TOOL["page"](), "run: python tools/metrics.py docs/metrics.md"


def test_every_number_that_the_code_of_the_trainer_names_has_a_meaning() -> None:
    source = "".join((TOOL["SOURCE"] / file).read_text() for file in TOOL["TRAINER"])
    names = {name for name in re.findall(r'f?"([a-z]+/[\w{}/]+)"\]?(?::| =)', source) if not name.startswith("mismatch/")}
    assert len(names) > 25 and [name for name in sorted(names) if meaning_of(f"train/{name}") is None] == []


def test_every_alarm_that_is_raised_is_in_the_table_and_no_other() -> None:
    source = "".join(path.read_text() for path in sorted(TOOL["SOURCE"].rglob("*.py")))
    raised = set(re.findall(r'(?:facts\.Alarmed|self\._say)\(\s*"(\w+)"', source))
    assert len(raised) > 12
    assert {name for name, _ in table('### `"kind": "alarm"`: what somebody should look at')} == raised


def test_every_name_that_a_line_may_lead_to_has_a_meaning() -> None:
    given = dict.fromkeys(("tools/calls", "tools/add/calls", "tools/add/failures", "tools/unknown", "tools/exhausted", "fields/x"), 1.0)
    trainer = ("age/3/share", "age/3/masked_veto", "masked/veto", "mismatch/same_keys/k3", "reward/style", *TRAINER_KEYS)
    measured = ("reward", "reward_spread", "zero_spread_share", "generated_length", "trained_length", "truncated_share", "turns_mean")
    measured += ("staleness_mean", "staleness_max", "stage_seconds", "pause_seconds", "groups")
    line = StepLine(
        step=1, version=1, seconds=1.0, step_seconds=1.0, tokens=1, rollouts=1, generation_rate=1.0, training_rate=1.0, totals=Totals(),
        metrics=given, components={"style": 1.0}, lengths={"terminated_min": 2.0, "max": 3.0}, trainer=dict.fromkeys(trainer, 1.0),
        **dict.fromkeys(measured, 1),  # type: ignore[arg-type]
    )  # fmt: skip
    score = EvaluationLine(version=1, step=1, seconds=1.0, source="a/b", num_tasks=3, mean_reward=0.5)
    names = [*metrics_of(line), *metrics_of(score)]
    assert len(names) > 40 and [name for name in names if meaning_of(name) is None] == []
    assert [name for name in SAME if meaning_of(name) is None] == [], "and trl's names are of ours"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/rho/ess", "train/rho/ess"),
        ("train/age/12/rho_mean", "train/age/<n>/<reading>"),
        ("rollout/length_mean", "rollout/length_mean"),
        ("rollout/length_max", "rollout/length_<name>"),
        ("rollout/reward/a b/c", "rollout/reward/<name>"),
        ("rollout/reward_mean", "rollout/reward_mean"),
        ("tools/add/seconds", "tools/<name>/<reading>"),
        ("eval/spell_backward/reward", "eval/<source>/reward"),
    ],
)
def test_a_name_is_found_by_itself_before_its_family(name: str, known: str) -> None:
    assert meaning_of(name) == known
    assert meaning_of("elsewhere/x") is None


def test_names_stand_once_and_say_what_they_are_in() -> None:
    assert len(table("## Names for dashboards")) == len(MEANINGS) > 80 and all(MEANINGS.values())


@pytest.mark.parametrize("owner", [StepLine, EvaluationLine, Summary])
def test_the_page_has_every_key_of_a_line_and_of_the_summary(owner: type) -> None:
    named = set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", PAGE.read_text()))
    assert set(inspect.get_annotations(owner)) <= named


def test_every_metric_for_prometheus_is_in_the_table_with_its_labels() -> None:
    metrics = Metrics()
    tell_everything(metrics)
    metrics.learning = lambda: LearningStatus(1, 1, 1, 1, 1, 1, {"style": 1}, {"x": 1})
    metrics.accounts = lambda: Accounts(1, 1, 1, 0, 2, {"stale": 2})
    metrics.requests, metrics.memory = lambda: {"engine0": 3}, lambda: {("trainer", "7"): 2**20}
    told = dict(table("## `/metrics`"))
    for family in metrics.registry.collect():
        used = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.name in told and all(f"`{label}`" in told[family.name] for label in used), family.name
    assert told.keys() == {family.name for family in metrics.registry.collect()}, "and none that there is not"
    of_engines = dict(table("An embedded engine has a `/metrics` of its own:"))
    assert told.keys() | of_engines.keys() >= set(TOOL["RECENT"])
    assert 'midflight_process_bytes{pid="7",process="trainer"} 1.048576e+06' in metrics.text().decode()
