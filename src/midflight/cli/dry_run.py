"""`--dry-run`: shows the meaning of a configuration, before anything is started."""

import os
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midflight.cli.gpu_plan import gpu_plan, plan_notes
from midflight.cli.tables import new_table
from midflight.config import Config, derived
from midflight.config.bounds import rollout_bound
from midflight.config.devices import num_present
from midflight.config.gpus import DescribedGpus
from midflight.config.knobs import admission_limit, knobs
from midflight.config.loss_text import effective_loss
from midflight.config.memory import least_bytes, memory_estimate, total_bytes
from midflight.config.model_defaults import shown_derived
from midflight.config.notes import notes
from midflight.config.seats import BY_SERVER_ENGINE, by_server_engine, device_map
from midflight.config.transport import chosen_transport, version_bytes
from midflight.observe.readable import size
from midflight.run.launcher import opening
from midflight.run.launcher.checks.check import Findings, SamplePrompt, Severity, SourceFindings
from midflight.run.launcher.checks.tasks import QUANTILES, longest_prompt

SHOWN_TOKENS = 100


def print_report(
    config: Config,
    findings: Findings,
    console: Console | None = None,
    *,
    gpus: DescribedGpus | None = None,
) -> None:
    """Prints the report, and then the results of trainer, engine and export for the model. `gpus`
    are those that options describe.
    """
    shown = console or Console()
    shown.print(report(config, findings, gpus=gpus), highlight=False)
    for finding in findings.found:
        if finding.what == "proofs" and finding.severity is Severity.OK:
            shown.print(Text(finding.found), highlight=False)


def report(
    config: Config, findings: Findings, *, gpus: DescribedGpus | None = None
) -> RenderableType:
    """Tables of run, tasks, first prompt, knobs, batch and staleness, loss, placement, GPUs and
    memory, and then notes. With `gpus` the last tables are a plan for these, and nothing is said
    of this machine.
    """
    parts: list[RenderableType] = [_run(config)]
    if findings.sources:
        parts.append(_sources(findings.sources))
    if findings.prompt is not None:
        parts.append(_prompt(findings.prompt))
    parts += [
        _knobs(config),
        _derived(config),
        _loss(config, findings.own_loss),
        _placement(config),
    ]
    longest = longest_prompt(findings.sources)
    if gpus is None:
        parts += _devices(config, num_present(os.environ) or None)
        parts.append(_memory(config, longest))
        remarks = [*opening.remarks(config), *findings.notes]
    else:
        parts += gpu_plan(config, gpus, longest)
        remarks = [*notes(config), *plan_notes(config, gpus), *findings.notes]
    if remarks:
        parts.append(Text("\n".join(f"note: {remark}" for remark in remarks), style="yellow"))
    return Group(*parts)


def _run(config: Config) -> Table:
    sizes = derived.model_sizes(config.model)
    table = new_table(f"run {escape(config.run.name)}")
    table.add_row("folder", Text(str(config.run.folder)))
    until = f", or reward {config.run.stop_at_reward}" if config.run.stop_at_reward else ""
    table.add_row("steps", f"{config.run.steps}{until}")
    origin = f"from {config.model.path}" if config.model.path else "made, random weights"
    table.add_row(
        "model", f"{sizes.num_parameters:,} parameters, {config.model.dtype}, {escape(origin)}"
    )
    served = derived.served_dtype(config)
    if served != config.model.dtype:
        table.add_row("served", served)
    table.add_row("warm start", escape(opening.warm_start(config) or "none"))
    for source in config.environment.sources:
        table.add_row("tasks", escape(f"{source.described}, weight {source.weight:g}"))
    return table


def _sources(found: Sequence[SourceFindings]) -> Table:
    shares = ", ".join(f"{quantile:.0%}" for quantile in QUANTILES)
    table = new_table(
        "tasks", "source", "training", "held out", "left out", f"tokens of a prompt at {shares}"
    )
    for source in found:
        counts = (f"{n:,}" for n in (source.num_training, source.num_heldout, source.num_left_out))
        table.add_row(
            escape(source.name),
            *counts,
            f"{', '.join(map(str, source.lengths))} (of {source.num_measured:,} measured)",
        )
    return table


def _prompt(prompt: SamplePrompt) -> Table:
    table = new_table("first prompt")
    table.add_row("task", Text(f"{prompt.task} of {prompt.source}"))
    table.add_row("text", Text(prompt.text))
    shown = "  ".join(f"{number} {token}" for number, token in prompt.tokens[:SHOWN_TOKENS])
    left = len(prompt.tokens) - SHOWN_TOKENS
    if left > 0:
        shown += f"  and {left} more"
    table.add_row(f"{len(prompt.tokens)} tokens", Text(shown))
    return table


def _knobs(config: Config) -> Table:
    table = new_table("six knobs of asynchrony", "knob", "value", "meaning", "binds")
    for knob in knobs(config):
        table.add_row(knob.name, knob.value, knob.effect, "yes" if knob.binds else "")
    return table


def _derived(config: Config) -> Table:
    r = config.rollout
    stale = derived.worst_staleness(r)
    table = new_table("derived")
    table.add_row(
        "batch",
        f"{r.groups_per_step} groups x {r.group_size} = {derived.batch_rollouts(r)} rollouts a step",
    )
    table.add_row(
        "admission",
        (
            f"submitted - released <= (served version + {r.max_staleness + 1}) x "
            f"{r.groups_per_step}: {admission_limit(r, 0)} groups at first"
        ),
    )
    table.add_row("worst-case staleness", f"{stale.worst} versions; price: {stale.price}")
    bound = rollout_bound(config.environment)
    table.add_row(
        "agent's own time",
        (
            f"{config.environment.rollout_seconds:g} s a rollout; requests, tools within their "
            "limits and waits left out"
        ),
    )
    table.add_row("whole rollout", f"{bound.seconds:,.0f} s at most: {bound.words}")
    table.add_row(
        "smallest group", f"{derived.min_group_size(r)} scored rollouts of {r.group_size}"
    )
    by_itself, reason = chosen_transport(config)
    transport = config.weights.transport
    if transport != by_itself:
        reason = f'as said; "auto" would be {by_itself}: {reason}'
    if by_server_engine(config):
        reason = f"{reason}; {BY_SERVER_ENGINE}"
    table.add_row("weights", f"{size(version_bytes(config))} a version by {transport}: {reason}")
    for option in shown_derived(config):
        table.add_row(option.option, f"{option.words}: {option.why}")
    return table


def _loss(config: Config, own_loss: str | None) -> Table:
    table = new_table("effective loss")
    lines = [*effective_loss(config)]
    if own_loss:
        lines.append(own_loss)
    for line in lines:
        table.add_row("", Text(line))  # its brackets are no markup
    return table


def _placement(config: Config) -> Table:
    table = new_table("placement", "process", "count", "threads", "device", "what for")
    for place in derived.placement(config):
        table.add_row(place.process, str(place.count), str(place.threads), place.device, place.task)
    return table


def _devices(config: Config, number: int | None) -> list[Table]:
    """Returns a table of the GPUs, host by host, or nothing if all compute on CPUs. An earlier
    check has found whether this machine has too few.
    """
    laid = device_map(config, number=number)
    if not laid:
        return []
    table = new_table("GPUs", "host", "device", "who")
    for part in sorted(laid, key=lambda part: (part.host, part.devices)):
        table.add_row(
            escape(part.host),
            ", ".join(map(str, part.devices)) or f"{part.number} that Ray chooses",
            part.who,
        )
    return [table]


def _from_to(least: int, most: int) -> str:
    """Sizes as they are read: one where both are written alike."""
    if not least and most:
        return f"at most {size(most)}"
    if size(least) == size(most):
        return size(most)
    return f"{size(least)} to {size(most)}"


def _memory(config: Config, longest: int | None) -> Table:
    """Returns a table of the memory of each part, with the total of each kind of process: from what
    is taken in any case to the worst case, which is every slot full and every rollout as long as
    can be.
    """
    items = memory_estimate(config, derived.model_sizes(config.model), longest_prompt=longest)
    table = new_table("memory, estimated", "where", "what", "size", "together")
    for where, lines in groupby(items, lambda item: item.where):
        own = list(lines)
        for number, item in enumerate(own):
            name = "" if number else where
            is_last = number == len(own) - 1
            together = _from_to(least_bytes(own), total_bytes(own)) if is_last else ""
            taken = _from_to(item.least_bytes, item.num_bytes)
            table.add_row(name, item.what, taken, together)
    together = _from_to(least_bytes(items), total_bytes(items))
    table.add_row("total", "", "", together, style="bold")
    return table
