"""Writes docs/formulas.md: every formula of the loss, with its options, defaults and paper.

    python tools/formulas.py docs/formulas.md

A formula is a row of `config.formulas`, which the dry run prints too; its source is the last paragraph of the docstring
of the function that computes it, in `trainer.formulas`. Objectives of one function share a row.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from midflight.config.formulas import (
    ADVANTAGES,
    DIVERGENCES,
    MASKS,
    OBJECTIVES,
    REDUCTIONS,
    WEIGHTS,
    Formula,
    ObjectiveFormula,
)
from midflight.config.loss import ObjectiveSection
from midflight.trainer.formulas import advantages, corrections, losses, reductions
from midflight.trainer.objective import BEYOND_TOKEN, parameters

CLIPS = {"low": "1 - `clip_low`", "high": "1 + `clip_high`"}
RATIOS = {"bypass": "R", "decoupled": "r"}
"""The ratio that an objective of each form looks at."""
OTHERS = {"length": "`environment.max_tokens`", "trace": "γ λ", "discount": "γ"}
"""What stands for the numbers of a formula that are no option of its section."""

PAGE = """\
# Formulas of the loss

*A page to look things up in.*

Made from the code by `python tools/formulas.py docs/formulas.md`. [Algorithms](algorithms.md#notation) says what the letters mean and which of these go together. What has a * looks at its rollout or at the batch: the step then begins with a forward over all tokens.

## Objectives

{objectives}
## Weights

{weights}
## Masks

{masks}
## Advantages

{advantages}
## Reductions

{reductions}
## Divergences

{divergences}"""


def page() -> str:
    unset = ObjectiveSection()
    return PAGE.format(
        objectives=_table(
            ("`objective.kind`", "loss of a token", "knobs and defaults", "source"),
            _objectives(unset.kind),
        ),
        weights=_table(
            ("`correction.weight`", "w", "defaults", "source"),
            _rows(WEIGHTS.items(), corrections, default="tis"),
        ),
        masks=_table(
            ("mask", "keeps tokens with", "source"),
            _masks(),
        ),
        advantages=_table(
            ("`objective.advantage`", "formula", "source"),
            _without_options(_rows(ADVANTAGES.items(), advantages, default=unset.advantage)),
        ),
        reductions=_table(
            ("`objective.reduction`", "formula", "source"),
            _without_options(_rows(REDUCTIONS.items(), reductions, default="token_mean")),
        ),
        divergences=_table(
            ("`objective.kl`", "per token", "source"),
            _without_options(_rows(DIVERGENCES.items(), losses, default=unset.kl)),
        ),
    )


def _objectives(default: str) -> Iterator[tuple[str, ...]]:
    """A row for each function: where several objectives have it, they differ in the ratio alone."""
    alike: dict[str, dict[str, ObjectiveFormula]] = {}
    for kind, row in OBJECTIVES.items():
        alike.setdefault(row.function, {})[kind] = row
    for name, rows in alike.items():
        (kind, row), *others = rows.items()
        function = _function(losses, name)
        said = _said(function)
        if row.demand is not None:
            said = f"{said} Only with `{row.demand.option}` {row.demand.value}."
        names = [_starred(kind, function, default=default)]
        names += [f"`{other}` with {RATIOS[found.form]}" for other, found in others]
        yield "; ".join(names), _loss(row), _knobs(row), said


def _loss(row: ObjectiveFormula) -> str:
    """The loss of a token, with the terms of options that may be left out."""
    return _named(row.text + "".join(row.at_will.values()), CLIPS)


def _knobs(row: ObjectiveFormula) -> str:
    knobs = [_option(name, value) for name, value in row.options.items()]
    knobs += [f"`{name}` none" for name in row.at_will]
    if row.reduction != "token_mean" and row.demand is None:
        knobs.append(f"`reduction` {row.reduction}")
    return ", ".join(knobs)


def _rows(
    rows: Iterable[tuple[str, Formula]], module: ModuleType, *, default: str
) -> Iterator[tuple[str, ...]]:
    for name, row in rows:
        function = _function(module, row.function)
        options = ", ".join(_option(option, value) for option, value in row.options.items())
        yield (
            _starred(name, function, default=default),
            _named(row.text, OTHERS),
            options,
            _said(function),
        )


def _without_options(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for name, text, _, said in rows:
        yield name, text, said


def _masks() -> Iterator[tuple[str, ...]]:
    for name, row in MASKS.items():
        function = _function(corrections, row.function)
        bounds = {bound: f"`{option}`" for bound, option in row.bounds.items()}
        yield _starred(name, function), _named(row.text, bounds), _said(function)


def _function(module: ModuleType, name: str) -> Callable[..., object]:
    return getattr(module, name)


def _starred(name: str, function: Callable[..., object], *, default: str = "") -> str:
    star = " *" if BEYOND_TOKEN & set(parameters(function)) else ""
    return f"`{name}`{star}{' (default)' if name == default else ''}"


def _option(name: str, value: float) -> str:
    return f"`{name}` {value:g}"


def _named(text: str, names: Mapping[str, str]) -> str:
    """The text with options in the places of their numbers."""
    return re.sub(r"\{(\w+)(?::g)?\}", lambda found: names.get(found[1], f"`{found[1]}`"), text)


def _said(function: Callable[..., object]) -> str:
    """The last paragraph of the docstring, on one line. Numbers of papers become links."""
    _, _, last = (inspect.getdoc(function) or "").rpartition("\n\n")
    text = " ".join(last.split())
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(header), "|".join("---" for _ in header)]
    for row in rows:
        lines.append(" | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in row))
    head, rule, *body = lines
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in body), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="what is written, such as docs/formulas.md")
    parser.parse_args().page.write_text(page())


if __name__ == "__main__":
    main()
