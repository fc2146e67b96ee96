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
from pathlib import Path

from midflight.models.proof import TOLERANCE, Proof, Way

MAX_CONTEXT = 64
WORKERS = 2
SAID = {Way.PACKED: "right", Way.FALLBACK: "right, slower", Way.REFUSED: "refused"}
RANK = {said: rank for rank, said in enumerate(SAID.values())}
HEAD = f"""# Models

Made by `make test-models` from tiny models of every architecture ([tests/models/zoo.py](../tests/models/zoo.py)); edit the code instead. Each is held
against its own eager forward in `transformers`, row by row, in float32: rows shorter and longer than every window, chunk and rotary boundary, log-probabilities
at temperature 0.7 and the gradient of a step in the trainer, prefill and decoding of several sequences in the embedded engine, and a folder written,
read and written again. Only text is trained: of a model that also reads images the text tower, while its other parts stay as they are.

`midflight check-model DIR` says the same of a model of yours, and every run proves its model before it begins.

- **right**: trained in packed rows, or served in slots, or exported by its own names.
- **right, slower**: trained in padded rows, or served one sequence at a time. The same numbers.
- **refused**: the run does not begin, and says why. vLLM or SGLang may serve what the embedded engine refuses ([engines](engines.md)).

The worst error of a log-probability in nats, and of a gradient as a share of its size; none may be above {TOLERANCE:g}.

| model | trainer | nats | gradient | embedded engine | nats | export |
|---|---|---|---|---|---|---|
"""


def proven(name: str) -> list[Proof]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from tests.models.zoo import tiny

    from midflight.run.launcher.proofs import proofs

    return proofs(tiny(name), max_context=MAX_CONTEXT)


def row(name: str, found: list[Proof]) -> str:
    trainer, engine, export = found
    cells = [SAID[trainer.way], _error(trainer, trainer.logprob_error), _error(trainer, trainer.gradient_error)]
    return f"| {name} | {' | '.join([*cells, SAID[engine.way], _error(engine, engine.logprob_error), SAID[export.way]])} |"


def _error(proof: Proof, error: float | None) -> str:
    """Its power of ten, rounded up: rounding differs between machines."""
    if error is None or not proof.is_right:
        return ""
    return next(f"< 1e-{power}" for power in range(5, -9, -1) if error < 10.0**-power)


def states(page: str) -> dict[str, list[str]]:
    """What each row of a page says of trainer, engine and export."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {cells[0]: [cells[1], cells[4], cells[6]] for cells in lines[1:]}


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
    from tests.models.zoo import ZOO

    with ProcessPoolExecutor(WORKERS) as pool:
        found = dict(zip(ZOO, pool.map(proven, ZOO, chunksize=4), strict=True))
    before = given.page.read_text() if given.page.exists() else ""
    given.page.write_text(HEAD + "\n".join(row(name, proofs) for name, proofs in found.items()) + "\n")
    bad = faults(found, before) if given.check else []
    print("\n".join(bad) or f"{len(found)} architectures")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
