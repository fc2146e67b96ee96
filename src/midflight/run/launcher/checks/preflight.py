"""The process of the checks that need the user's code or torch. It changes nothing.

    python -m midflight.run.launcher.checks.preflight CALLER PURPOSE ABOUT...

It reads objects of the program that starts the run, and a configuration, from standard input and
writes `Findings` to standard output. Importing this needs no torch; a run of it may.
"""

import os
import sys

import msgspec

from midflight import given
from midflight.config.sections import Config
from midflight.run.launcher.checks.check import About, Caller, Plan
from midflight.run.launcher.checks.table import IN_TRIAL, ask, findings
from midflight.run.launcher.trial import trying
from midflight.run.parts import Purpose


def main() -> None:
    with trying() as trial:
        given.read(sys.stdin.buffer)
        config = Config.model_validate_json(sys.stdin.read())
        caller, purpose, *about = sys.argv[1:]
        things = frozenset(map(About, about))
        plan = Plan(config, Caller(caller), Purpose(purpose), things, doing=trial.doing)
        trial.answer(msgspec.json.encode(findings(plan, ask(plan, IN_TRIAL))))


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the user's modules are not waited for
