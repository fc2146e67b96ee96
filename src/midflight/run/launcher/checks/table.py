"""The list of all checks before a run, and how it is asked.

Three callers ask it about this machine: the start of a run, its dry run, and `midflight doctor`. A
dry run for GPUs that are described asks only what no machine answers. Each check stands here once,
in the order in which it is asked. All but doctor end between two parts of the list if there is an
error by then.
"""

from collections.abc import Callable, Iterable

import msgspec

from midflight.config.agent import agent_of
from midflight.errors import ConfigError, MidflightError
from midflight.run.launcher.checks import (
    cluster,
    described_gpus,
    devices,
    engines,
    environment,
    fit,
    folder,
    isolation,
    machine,
    model,
    own_trainer,
    software,
    tasks,
)
from midflight.run.launcher.checks.check import (
    ANYWHERE,
    TASKS,
    About,
    Caller,
    Check,
    Finding,
    Findings,
    Plan,
    Severity,
    error,
)
from midflight.run.launcher.trial import TrialWait, module_answer
from midflight.run.parts import Purpose

MACHINE = About.MACHINE
ROOM = About.ROOM
MODEL = About.MODEL
RUN = About.RUN
ALL = frozenset(Purpose)
FOREIGN = frozenset({Purpose.ROLLOUTS})
DOCTOR = frozenset({Caller.DOCTOR})
DRY_RUN = frozenset({Caller.DRY_RUN})
PLAN = frozenset({Caller.PLAN})

AT_ONCE = (
    # the check, what it is about, its commands if not those with tasks, its callers if not the three
    Check(software.versions, MACHINE, ALL, DOCTOR),
    Check(software.packages, MACHINE, ALL),
    Check(machine.machine, MACHINE, ALL),
    Check(machine.limits, MACHINE, ALL),
    Check(model.model, MODEL, ALL, ANYWHERE),
    Check(model.teacher, RUN, TASKS, ANYWHERE),
    Check(engines.interpreter, RUN, ALL),
    Check(fit.sizes, RUN, ALL, ANYWHERE),
    Check(described_gpus.described_gpus, RUN, TASKS, PLAN),
    Check(own_trainer.own_trainer, RUN, FOREIGN),
    Check(folder.run_folder, RUN),
    Check(folder.trained_share, RUN, TASKS, DOCTOR),
)
IN_TRIAL = (
    # these need the user's code, or libraries that this process does without
    Check(environment.environment, RUN, TASKS, ANYWHERE),
    Check(isolation.isolation, RUN),
    Check(environment.sandbox, RUN),
    Check(environment.untracked, RUN),
    Check(tasks.sources, RUN, TASKS, ANYWHERE),
    Check(tasks.same_rows, RUN, TASKS, ANYWHERE),
    Check(tasks.columns, RUN, TASKS, ANYWHERE),
    Check(model.tokenizer, MODEL, TASKS, ANYWHERE),
    Check(model.chat_template, MODEL, TASKS, DOCTOR),
    Check(tasks.prompt, RUN, TASKS, ANYWHERE),
    Check(tasks.rows, RUN, TASKS, ANYWHERE),
    Check(tasks.lengths, RUN, TASKS, ANYWHERE),
    Check(tasks.memory, RUN),
    Check(tasks.conversations, RUN, TASKS, ANYWHERE),
    Check(model.architecture, RUN),
    Check(model.adapters, RUN),
    Check(environment.own_loss, RUN, TASKS, ANYWHERE),
    Check(environment.trackers, RUN),
)
BESIDE_TRIAL = (
    Check(devices.torch, MACHINE),
    Check(devices.devices, ROOM),
    Check(engines.servers, MACHINE, TASKS, DOCTOR),
    Check(folder.disk, ROOM),
    Check(machine.shared_memory, ROOM),
    Check(machine.port, ROOM),
    Check(machine.view_port, ROOM),
    Check(engines.attached, RUN),
)
AT_LAST = (
    Check(cluster.cluster, RUN, ALL),
    Check(model.proofs, RUN, TASKS, DRY_RUN),
)


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
    found = ask(plan, AT_ONCE)
    if _goes_on(plan, found):
        beside: list[Finding] = []

        def ask_beside() -> None:
            meanwhile()
            beside.extend(ask(plan, BESIDE_TRIAL))

        tried = trial(plan, meanwhile=ask_beside)
        found += beside + tried
    if _goes_on(plan, found):
        found += ask(plan, AT_LAST)
    return findings(plan, found)


def _goes_on(plan: Plan, found: Iterable[Finding]) -> bool:
    return plan.caller is Caller.DOCTOR or not any(one.severity is Severity.ERROR for one in found)


def ask(plan: Plan, checks: Iterable[Check]) -> list[Finding]:
    """Asks those of the checks that the plan asks for, in this process."""
    found: list[Finding] = []
    for check in checks:
        if (
            check.about in plan.about
            and plan.purpose in check.purposes
            and plan.caller in check.callers
        ):
            found += _asked(plan, check)
    return found


def _asked(plan: Plan, check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check.look(plan) or ())
    except (MidflightError, OSError) as refused:
        severity = Severity.WARNING if check.callers == DOCTOR else Severity.ERROR
        found += [Finding(severity, check.name, line) for line in str(refused).splitlines()]
    if plan.caller is Caller.DOCTOR or check.about is RUN:
        return found
    # a start tells nothing of a machine or a model but what stops it
    return [one for one in found if one.severity is Severity.ERROR]


def findings(plan: Plan, found: Iterable[Finding]) -> Findings:
    """These findings, each error once, with what the checks have read."""
    loaded = plan.loaded
    kept: list[Finding] = []
    errors = set[str]()
    for one in found:
        if one.severity is Severity.ERROR:
            if one.found in errors:
                continue
            errors.add(one.found)
        kept.append(one)
    return Findings(tuple(kept), loaded.prompt, loaded.own_loss, tuple(loaded.survey))


def trial(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> list[Finding]:
    """Asks the checks of the trial in a process of their own. Waits for that process as long as it
    moves, and reports the wait; `meanwhile` is called beside it. Without tasks or a model to look
    at there is no such process.
    """
    if plan.purpose not in TASKS or not plan.about & {MODEL, RUN}:
        meanwhile()
        return []
    config = plan.config
    what = (
        f"trying the configuration (the agent is {agent_of(config.environment)!r}, "
        f"objective.kind is {config.objective.kind!r})"
    )
    try:
        answer = module_answer(
            "checks.preflight",
            TrialWait(what, config.run.stall_seconds),
            plan.caller,
            plan.purpose,
            *plan.about,
            given=plan.objects + config.model_dump_json().encode(),
            meanwhile=meanwhile,
        )
    except ConfigError as failed:
        return [error("configuration", str(failed))]
    said = _read(answer)
    if isinstance(said, str):
        during = f" while it {said}" if said else ""
        found = f"{what} ended without a result{during}; take out what ends the process there"
        return [error("configuration", f"{found} (os._exit).")]
    loaded = plan.loaded
    loaded.prompt = said.prompt
    loaded.own_loss = said.own_loss
    loaded.survey = list(said.sources)
    return list(said.found)


def _read(answer: bytes) -> Findings | str:
    """The answer of the trial. If it ended without one, this is its last action, or an empty
    text.
    """
    try:
        return msgspec.json.decode(answer, type=Findings | str)
    except msgspec.DecodeError:
        return ""
