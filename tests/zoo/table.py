"""docs/models.md: what trainer, embedded engine and export make of every architecture of the zoo.

python -m tests.zoo.table docs/models.md           writes it
python -m tests.zoo.table --check docs/models.md   also fails where a row is worse than in the page as it is, or off by more than `TOLERANCE`
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from midflight.errors import ConfigError
from midflight.models.proof import TOLERANCE, Proof, Way

MAX_CONTEXT = 64
WORKERS = 2
SAID = {Way.PACKED: "right", Way.FALLBACK: "right, slower", Way.WHOLE: "right, slowest", Way.REFUSED: "refused"}
PARTS = ("trainer", "engine", "export")
NAMED = {"trainer": "trainer", "engine": "embedded engine", "export": "export"}
RANK = {said: rank for rank, said in enumerate(SAID.values())}
HEAD = f"""# Models

*A page to look things up in.*

Made by `make test-models` from tiny models of every architecture ([tests/models/zoo.py](../tests/models/zoo.py)); edit the code instead. Each is held
against its own forward in `transformers`, in float32: log-probabilities at temperature 0.7 and the gradient of a step, prefill and decoding in the
embedded engine, and a folder written and read again. Of a model that also reads images only the text tower is trained.

`midflight check-model DIR` says the same of a model of yours, a folder or a [GGUF file](pretrained.md). Every run proves its model before it begins.

- **right**: trained in packed rows, or served in slots, or exported by its own names.
- **right, slower**: trained in padded rows, or served one sequence at a time. The same numbers.
- **right, slowest**: each token computes its whole sequence. The same numbers.
- **refused**: the run does not begin, and says why. vLLM or SGLang may serve what the embedded engine refuses ([engines](engines.md)).

The worst error of a log-probability in nats, and of a gradient as a share of its size; none may be above {TOLERANCE:g}. Proven with
`transformers` {version("transformers")}.

| models | trainer | nats | gradient | embedded engine | nats | export |
|---|---|---|---|---|---|---|
"""


def proven(name: str) -> list[Proof]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from tests.models.zoo import tiny

    from midflight.run.launcher.checks.proofs import proofs

    try:
        return proofs(tiny(name), max_context=MAX_CONTEXT)
    except ConfigError as error:  # its own forward raises
        return [Proof(part, Way.REFUSED, reason=str(error)) for part in PARTS]


def cells(found: list[Proof]) -> tuple[str, ...]:
    """What a row says behind its models."""
    trainer, engine, export = found
    errors = _error(trainer, trainer.logprob_error), _error(trainer, trainer.gradient_error)
    return SAID[trainer.way], *errors, SAID[engine.way], _error(engine, engine.logprob_error), SAID[export.way]


def rows(found: dict[str, list[Proof]]) -> str:
    """A row for all models of which the same is to be said."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, proofs in found.items():
        alike.setdefault(cells(proofs), []).append(name)
    return "\n".join(f"| {', '.join(names)} | {' | '.join(said)} |" for said, names in alike.items())


def counted(found: dict[str, list[Proof]]) -> str:
    """How many architectures each part computes, in which way."""
    lines = []
    for number, part in enumerate(PARTS):
        ways = Counter(SAID[proofs[number].way] for proofs in found.values())
        lines.append(f"- {NAMED[part]}: {'; '.join(f'{ways[said]} {said}' for said in SAID.values() if ways[said])}.")
    return "\n".join(lines)


def reasons(found: dict[str, list[Proof]]) -> str:
    """Of what is refused, each distinct reason of a model with the parts that give it. Backticks stand for names of ours alone."""
    lines = []
    for name, proofs in found.items():
        parts: dict[str, list[str]] = {}
        for proof in proofs:
            if not proof.is_right:
                parts.setdefault(proof.reason.replace("`", ""), []).append(NAMED[proof.part])
        lines += [f"- **{name}**, {', '.join(of)}: {reason}" for reason, of in parts.items()]
    return "\n".join(lines) or "Nothing is refused."


def page(found: dict[str, list[Proof]]) -> str:
    return (
        f"{HEAD}{rows(found)}\n\n## Counted\n\n{len(found)} architectures.\n\n{counted(found)}\n\n## Refused, and why\n\n{reasons(found)}\n"
    )


def _error(proof: Proof, error: float | None) -> str:
    """Its power of ten, rounded up: rounding differs between machines."""
    if error is None or not proof.is_right:
        return ""
    return next(f"< 1e-{power}" for power in range(5, -9, -1) if error < 10.0**-power)


def states(page: str) -> dict[str, list[str]]:
    """What a page's table says of trainer, engine and export, by model."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {name: [cells[1], cells[4], cells[6]] for cells in lines[1:] for name in cells[0].split(", ")}


def faults(found: dict[str, list[Proof]], before: str) -> list[str]:
    old = states(before) if before else {}
    said: list[str] = []
    for name, proofs in found.items():
        for proof, was in zip(proofs, old.get(name, ["refused"] * 3), strict=True):
            errors = [error for error in (proof.logprob_error, proof.gradient_error) if error is not None]
            if proof.is_right and max(errors) > TOLERANCE:
                said.append(f"{name}: {proof.part} is off by {max(errors):.2g}")
            if RANK[SAID[proof.way]] > RANK[was]:
                said.append(f"{name}: {proof.part} was {was!r} and is {SAID[proof.way]!r}: {proof.reason}")
    return said + [f"{name} is gone" for name in old.keys() - found.keys()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    from tests.models.zoo import ZOO, not_here

    with ProcessPoolExecutor(WORKERS) as pool:
        found = dict(zip(ZOO, pool.map(proven, ZOO, chunksize=4), strict=True))
    before = given.page.read_text() if given.page.exists() else ""
    given.page.write_text(page(found))
    bad = faults(found, before) if given.check else []
    print("\n".join(bad) or f"{len(found)} architectures")
    if unknown := not_here():
        print(f"transformers {version('transformers')} also has {', '.join(unknown)}: add them to tests/models/zoo.py.")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
