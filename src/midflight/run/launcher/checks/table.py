"""The list of all checks before a run, and how it is asked.

Three callers ask it: the start of a run, its dry run, and `midflight doctor`. Each check stands
here once, in the order in which it is asked. A start and a dry run end between two parts if there
is an error by then; doctor goes on. The checks that need the user's code or torch run in a process
of their own (`preflight`), and beside it the others of their part.
"""

import os
from collections.abc import Callable, Iterable

import msgspec

from midflight.config.agent import agent_of
from midflight.errors import ConfigError, MidflightError
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.launcher.checks import (
    cluster,
    devices,
    engines,
    environment,
    fit,
    folder,
    machine,
    model,
    own_trainer,
    software,
    tasks,
)
from midflight.run.launcher.checks.check import (
    About,
    Caller,
    Check,
    Finding,
    Findings,
    Plan,
    Severity,
)
from midflight.run.launcher.trial import TrialWait, module_answer
from midflight.run.parts import Purpose

MACHINE = About.MACHINE
MODEL = About.MODEL
RUN = About.RUN
TASKS = frozenset({Purpose.TRAIN, Purpose.ROLLOUTS})
"""Commands that draw tasks, publish versions and keep a run in a folder."""
TRAINING = frozenset({Purpose.TRAIN})
FOREIGN = frozenset({Purpose.ROLLOUTS})
DOCTOR = frozenset({Caller.DOCTOR})
DRY_RUN = frozenset({Caller.DRY_RUN})

AT_ONCE = (
    Check("versions", software.versions, MACHINE, DOCTOR, informs=True),
    Check("packages", software.packages, MACHINE),
    Check("machine", machine.machine, MACHINE),
    Check("limits", machine.limits, MACHINE),
    Check("model", model.model, MODEL),
    Check("teacher", model.teacher, RUN, purposes=TASKS),
    Check("engine.python", engines.interpreter, RUN),
    Check("sizes", fit.sizes, RUN),
    Check("own trainer", own_trainer.own_trainer, RUN, purposes=FOREIGN),
    Check("run.folder", folder.run_folder, RUN, purposes=TASKS),
)
TRIED = (
    Check("torch", devices.torch, MACHINE),
    Check("devices", devices.devices, MACHINE),
    Check("servers", engines.servers, MACHINE, DOCTOR, informs=True),
    Check("disk", folder.disk, MACHINE, purposes=TASKS),
    Check("shared memory", machine.shared_memory, MACHINE, purposes=TASKS),
    Check("port", machine.port, MACHINE, purposes=TASKS),
    Check("environment", environment.environment, RUN, purposes=TASKS, in_trial=True),
    Check("sources", tasks.sources, RUN, purposes=TASKS, in_trial=True),
    Check("columns", tasks.columns, RUN, purposes=TASKS, in_trial=True),
    Check("tokenizer", model.tokenizer, MODEL, purposes=TASKS, in_trial=True),
    Check("chat template", model.chat_template, MODEL, DOCTOR, in_trial=True, informs=True),
    Check("prompt", tasks.prompt, RUN, purposes=TASKS, in_trial=True),
    Check("rows", tasks.rows, RUN, purposes=TASKS, in_trial=True),
    Check("worst memory", tasks.worst_memory, RUN, purposes=TRAINING, in_trial=True, informs=True),
    Check("warm_start.data", tasks.conversations, RUN, purposes=TASKS, in_trial=True),
    Check("architecture", model.architecture, RUN, purposes=TASKS, in_trial=True),
    Check("objective", environment.own_loss, RUN, purposes=TASKS, in_trial=True),
    Check("trackers", environment.trackers, RUN, purposes=TASKS, in_trial=True),
)
AT_LAST = (
    Check("cluster", cluster.cluster, RUN),
    Check("proofs", model.proofs, RUN, DRY_RUN),
)
PARTS = (AT_ONCE, TRIED, AT_LAST)
CHECKS = (*AT_ONCE, *TRIED, *AT_LAST)


def checked(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> Findings:
    """The findings on a run that may begin. Raises `ConfigError` with all errors if there are any.
    `meanwhile` is called beside the trial.
    """
    found = look(plan, meanwhile=meanwhile)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return found


def look(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> Findings:
    """Asks the checks of the plan. `meanwhile` is called beside the trial."""
    found: list[Finding] = []
    for part in PARTS:
        if any(map(is_error, found)) and plan.caller is not Caller.DOCTOR:
            break
        found += _part(plan, rows_of(plan, part), meanwhile)
    return findings(plan, found)


def _part(plan: Plan, checks: Iterable[Check], meanwhile: Callable[[], None]) -> list[Finding]:
    in_trial = [check for check in checks if check.in_trial]
    others = [check for check in checks if not check.in_trial]
    if not in_trial:
        return ask(plan, others)
    found: list[Finding] = []

    def beside() -> None:
        meanwhile()
        found.extend(ask(plan, others))

    tried = trial(plan, meanwhile=beside)
    return found + tried


def rows_of(plan: Plan, checks: Iterable[Check] = CHECKS) -> list[Check]:
    """Those of the checks that the plan asks for, in the order of the table."""
    return [
        check
        for check in checks
        if check.about in plan.about
        and plan.caller in check.callers
        and plan.purpose in check.purposes
    ]


def ask(plan: Plan, checks: Iterable[Check]) -> list[Finding]:
    """Asks these checks in this process."""
    found: list[Finding] = []
    for check in checks:
        # doctor tells all that a machine or a model has; others are only held up by its errors
        tells_all = plan.caller is Caller.DOCTOR or check.about is RUN
        for finding in _asked(plan, check):
            if tells_all or is_error(finding):
                found.append(finding)
    return found


def _asked(plan: Plan, check: Check) -> list[Finding]:
    severity = Severity.WARNING if check.informs else Severity.ERROR
    found: list[Finding] = []
    try:
        found.extend(check.look(plan) or ())
    except (MidflightError, OSError) as error:
        for line in str(error).splitlines():
            found.append(Finding(severity, check.name, line))
    return found


def is_error(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR


def findings(plan: Plan, found: Iterable[Finding]) -> Findings:
    """These findings, with what the checks have read."""
    loaded = plan.loaded
    return Findings(tuple(found), loaded.prompt, loaded.own_loss, loaded.survey)


def trial(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> list[Finding]:
    """Asks the checks that need the user's code or torch in a process of their own. Waits for that
    process as long as it moves, and reports the wait; `meanwhile` is called beside it.
    """
    config = plan.tried
    what = (
        f"trying the configuration (the agent is {agent_of(config.environment)!r}, "
        f"objective.kind is {config.objective.kind!r})"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop(TOKEN_VARIABLE, None)
    try:
        answer = module_answer(
            "checks.preflight",
            TrialWait(what, config.run.stall_seconds),
            plan.caller.value,
            plan.purpose.value,
            *sorted(plan.about),
            given=plan.objects + config.model_dump_json().encode(),
            environ=environ,
            meanwhile=meanwhile,
        )
    except ConfigError as failed:
        return [Finding(Severity.ERROR, "configuration", str(failed))]
    said = msgspec.json.decode(answer, type=Findings)
    loaded = plan.loaded
    loaded.prompt = said.prompt
    loaded.own_loss = said.own_loss
    loaded.survey = said.sources
    return list(said.found)
