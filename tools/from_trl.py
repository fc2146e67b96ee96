"""The table of options in docs/from-trl.md, and the record of trl's fields that it is held against.

    python tools/from_trl.py docs/from-trl.md         # writes the tables into the page
    python tools/from_trl.py --compare FOLDER         # the record against trl in this folder
    python tools/from_trl.py --record FOLDER          # writes the record anew

Neither imports trl: the fields are read from its source, so that an unpacked wheel is enough
(`pip download --no-deps trl`, then `unzip`). Those of transformers are read from the package that
is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from midflight.integrations.trl.arguments import (
    IDLE,
    MAPPED,
    REFUSED,
    TrainingArguments,
    default_of,
    meaning_of,
)
from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.grpo_config import GRPOConfig
from midflight.integrations.trl.losses import LOSS_TYPES, NOT_HERE

RECORD = Path(__file__).parents[1] / "tests" / "integrations" / "trl_fields.json"
BEGIN = "<!-- made by tools/from_trl.py -->"
END = "<!-- until here -->"
BASE = "trl/trainer/base_config.py"
SOURCES = {
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "AsyncGRPOConfig": "trl/experimental/async_grpo/async_grpo_config.py",
}
CLASSES: Mapping[str, type[TrainingArguments]] = {
    "GRPOConfig": GRPOConfig,
    "AsyncGRPOConfig": AsyncGRPOConfig,
}
OTHERS = (
    "All other fields of trl have no effect. A warning names one that is set, and the `--help` of "
    "a script says why."
)
COUNTERPART = re.compile(r"`(\w+)\.(\w+)`")
Fields = dict[str, Any]


# --- trl's fields ---------------------------------------------------------------------------------


def fields_in(source: Path) -> Fields:
    """The fields of the dataclasses in a file, with their defaults."""
    found: Fields = {}
    for node in ast.parse(source.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = _default(line.value)
    return found


def _default(value: ast.expr | None) -> Any:
    """The default of a field, which stands in a call of `field` or by itself."""
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords}
        if "default" in given:
            return ast.literal_eval(given["default"])
        return ast.unparse(given["default_factory"]) if "default_factory" in given else None
    return None if value is None else ast.literal_eval(value)


def fields_of_transformers() -> Fields:
    from transformers import TrainingArguments as Theirs

    found: Fields = {}
    for field in dataclasses.fields(Theirs):
        value = default_of(field)
        found[field.name] = getattr(value, "value", value)
    return found


def recorded(folder: Path) -> dict[str, Any]:
    """The record of the trl in this folder: its fields, on top of those of transformers."""
    general = fields_of_transformers()
    base = fields_in(folder / BASE)
    names = {"trl": _version_in(folder), "transformers": version("transformers")}
    classes: dict[str, Fields] = {}
    for name, source in SOURCES.items():
        own = fields_in(folder / source)
        classes[name] = dict(sorted((general | base | own).items()))
    return names | classes


def _version_in(folder: Path) -> str:
    found = sorted(folder.glob("trl-*.dist-info"))
    return found[-1].name.removeprefix("trl-").removesuffix(".dist-info") if found else "unknown"


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """One line for each field that came, went, or has another default."""
    for name in CLASSES:
        for field in sorted(theirs[name].keys() | ours[name].keys()):
            if field not in ours[name]:
                yield f"{name}.{field} is new, with {theirs[name][field]!r}"
            elif field not in theirs[name]:
                yield f"{name}.{field} is gone"
            elif theirs[name][field] != ours[name][field]:
                yield f"{name}.{field} is {theirs[name][field]!r} and was {ours[name][field]!r}"


# --- The page -------------------------------------------------------------------------------------


def table(config: type[TrainingArguments], other: type[TrainingArguments] | None = None) -> str:
    """The fields of a configuration: those with a counterpart, and those that are refused. Those
    that are accepted and do nothing are all others. A field that is just the same in the other
    configuration is left out.
    """
    meanings = _meanings(config)
    known = {} if other is None else _meanings(other)
    own = {name: found for name, found in meanings.items() if known.get(name) != found}
    lines = ["| option | here |", "|---|---|", *_rows(own, MAPPED), ""]
    lines += ["These are refused, unless they have their default:", ""]
    lines += ["| option | remedy |", "|---|---|", *_rows(own, REFUSED), ""]
    idle = ", ".join(f"`{name}`" for name, (kind, _) in own.items() if kind == IDLE)
    lines += [OTHERS if other is None else f"{idle} have no effect."]
    return "\n".join(lines)


def _meanings(config: type[TrainingArguments]) -> dict[str, tuple[str, str]]:
    """What becomes of each field, and the sentence on it."""
    found: dict[str, tuple[str, str]] = {}
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name):
        meaning = meaning_of(field)
        found[field.name] = (meaning.kind, str(meaning) or "they are of other machinery")
    return found


def _rows(meanings: Mapping[str, tuple[str, str]], kind: str) -> list[str]:
    """The rows of one kind. Fields with the same sentence share a row, and so do those that have
    the same name here. Of what is refused, the error gives the reason.
    """
    names: dict[str, list[str]] = {}
    for name, (found, sentence) in meanings.items():
        if found != kind:
            continue
        here = COUNTERPART.fullmatch(sentence)
        said = sentence.rpartition("; ")[2] if kind == REFUSED else sentence
        if here and here[2] == name:
            said = f"the same names in `[{here[1]}]`"
        names.setdefault(said, []).append(name)
    rows: list[str] = []
    for said, fields in names.items():
        sentence = meanings[fields[0]][1] if kind == MAPPED and len(fields) == 1 else said
        rows.append(f"| {', '.join(f'`{name}`' for name in fields)} | {sentence} |")
    return rows


def losses() -> str:
    """What each `loss_type` is here."""
    rows = ["| `loss_type` | `objective.kind`, `objective.reduction` |", "|---|---|"]
    alike: dict[str, list[str]] = {}
    for name, loss in LOSS_TYPES.items():
        alike.setdefault(f"`{loss.kind}`, `{loss.reduction}`", []).append(f"`{name}`")
    for name, remedy in NOT_HERE.items():
        alike[f"refused: {remedy}"] = [f"`{name}`"]
    rows += [f"| {', '.join(names)} | {here} |" for here, names in alike.items()]
    return "\n".join(rows)


PARTS = {
    "losses": losses,
    "GRPOConfig": lambda: table(GRPOConfig),
    "AsyncGRPOConfig": lambda: table(AsyncGRPOConfig, GRPOConfig),
}


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, made in PARTS.items():
        begin = BEGIN.replace(" -->", f": {name} -->")
        before, mark, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise SystemExit(f"the page has no place for {name}: {begin} ... {END}")
        text = f"{before}{begin}\n\n{made()}\n\n{END}{after}"
    return text


def main(words: list[str]) -> int:
    match words:
        case ["--compare", folder]:
            found = recorded(Path(folder))
            ours = json.loads(RECORD.read_text())
            lines = list(differences(found, ours))
            print("\n".join(lines) or f"trl {found['trl']} has the fields of {ours['trl']}")
            return 1 if lines else 0
        case ["--record", folder]:
            RECORD.write_text(json.dumps(recorded(Path(folder)), indent=1) + "\n")
            return 0
        case [path]:
            file = Path(path)
            file.write_text(page(file.read_text()))
            return 0
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
