"""docs/models.md: what trainer, embedded engine and export make of every architecture of the zoo.

python -m tests.zoo.table docs/models.md           writes it
python -m tests.zoo.table --check docs/models.md   also fails where a row is worse than in the page as it is, or off by more than `TOLERANCE`
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from midflight.errors import ConfigError
from midflight.models.proof import TOLERANCE, Proof, Way

MAX_CONTEXT = 64
WORKERS = 2
SAID = {Way.PACKED: "right", Way.FALLBACK: "right, slower", Way.WHOLE: "right, slowest", Way.REFUSED: "refused"}
PARTS = ("trainer", "engine", "export")
ROUNDING = -5
"""The power of ten below which an error is of rounding."""
RANK = {said: rank for rank, said in enumerate(SAID.values())}
HEAD = f"""# Models

*A page to look things up in.*

`midflight check-model DIR` proves a model of yours, a folder or a [GGUF file](pretrained.md), and says why a part refuses it. Every run does so before it
begins. Of a model that also reads images only the text tower is trained.

- **right**: trained in packed rows, served in slots, exported by its own names.
- **right, slower**: trained in padded rows, or served one sequence at a time.
- **right, slowest**: each token computes its whole sequence.
- **refused**: the run does not begin. vLLM or SGLang may serve what the embedded engine refuses ([engines](engines.md)).

`make test-models` makes this page. It compares tiny models ([tests/models/zoo.py](../tests/models/zoo.py)) with their own forward in `transformers`
{version("transformers")}, in float32.

| models | trainer | embedded engine | export |
|---|---|---|---|
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
    return tuple(SAID[proof.way] for proof in found)


def rows(found: dict[str, list[Proof]]) -> str:
    """A row for all models of which the same is to be said."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, proofs in found.items():
        alike.setdefault(cells(proofs), []).append(name)
    return "\n".join(f"| {', '.join(names)} | {' | '.join(said)} |" for said, names in alike.items())


def counted(found: dict[str, list[Proof]]) -> str:
    """How many architectures there are, and how many of them each part computes."""
    trained, served, exported = (sum(proofs[number].is_right for proofs in found.values()) for number in range(len(PARTS)))
    return f"Of {len(found)} architectures {trained} are trained, {served} served and {exported} exported."


def exactness(found: dict[str, list[Proof]]) -> str:
    """How far the worst log-probability and gradient are off, with the models in which that is more than rounding."""
    worst = {name: max((_power(proof) for proof in proofs if proof.is_right), default=ROUNDING) for name, proofs in found.items()}
    more = [f"{name} (1e{power})" for name, power in worst.items() if power > ROUNDING]
    excepted = f", but for {', '.join(more)}" if more else ""
    return (
        "Log-probabilities are off by less than 1e-5 nats, and gradients by less than 1e-5 of their size"
        f"{excepted}. None may be off by more than {TOLERANCE:g}."
    )


def page(found: dict[str, list[Proof]]) -> str:
    return f"{HEAD}{rows(found)}\n\n{counted(found)} {exactness(found)}\n"


def _power(proof: Proof) -> int:
    """The power of ten below which its errors are: rounding differs between machines."""
    found = max(error for error in (proof.logprob_error, proof.gradient_error, 0.0) if error is not None)
    return next(power for power in range(ROUNDING, 9) if found < 10.0**power)


def states(page: str) -> dict[str, list[str]]:
    """What a page's table says of trainer, engine and export, by model."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {name: cells[1:] for cells in lines[1:] for name in cells[0].split(", ")}


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
