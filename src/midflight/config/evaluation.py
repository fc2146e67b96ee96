"""The options of evaluations, with their checks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from midflight.config.section import Count, Positive, Seconds, Section
from midflight.config.sources import SourceSection, source_names
from midflight.types.generation import LEAST_TEMPERATURE


class SuiteSection(Section):
    """A suite asks held-out tasks in a way of its own."""

    name: str
    """Its name in metrics: `NAME/SOURCE`."""
    samples: Positive = 1
    """Answers to each task; pass@k and best@k go up to this."""
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    """Their temperature; 0 is greedy. Default: `environment.temperature`."""
    sources: tuple[str, ...] = ()
    """Sources whose held-out tasks it asks; empty is all."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k: the powers of two up to `samples`, and `samples`."""
        powers = {2**exponent for exponent in range(self.samples.bit_length())}
        return tuple(sorted(powers | {self.samples}))


class EvaluationSection(Section):
    eval_every: Count = 0
    """Steps between evaluations on held-out tasks; 0 evaluates before and after only."""
    pin_seconds: Seconds = 60.0
    """How long a version waits for a single engine's evaluation; larger loses fewer results."""
    suites: tuple[SuiteSection, ...] = ()
    """Further evaluations beside the usual one."""


def suite_contradictions(
    evaluation: EvaluationSection, sources: Sequence[SourceSection]
) -> Iterator[str]:
    named = zip(source_names(sources), sources, strict=True)
    held = [name for name, source in named if source.has_heldout]
    for name, count in Counter(suite.name for suite in evaluation.suites).items():
        if count > 1:
            yield (
                f"evaluation.suites has {name!r} twice, so nobody could tell their scores apart; "
                "give one of them another name"
            )
    for suite in evaluation.suites:
        said = f"evaluation.suites ({suite.name})"
        if not suite.name or "/" in suite.name:
            yield f"evaluation.suites has the name {suite.name!r}; give it one without a slash"
        if suite.temperature == 0 and suite.samples > 1:
            yield (
                f"{said}.samples ({suite.samples}) would be the same answer each time at "
                "temperature 0; remove it, or raise the temperature"
            )
        if suite.temperature is not None and 0 < suite.temperature < LEAST_TEMPERATURE:
            yield (
                f"{said}.temperature ({suite.temperature:g}) is too near to 0 to divide by; set it "
                f"to 0 for the likeliest token always, or to {LEAST_TEMPERATURE} and more"
            )
        for source in suite.sources:
            if source not in held:
                yield (
                    f"{said}.sources names {source!r}, which holds nothing out; those that do "
                    f"are {', '.join(held) or 'none'}"
                )
        if not held and not suite.sources:
            yield (
                f"{said} has nothing to ask: no source holds tasks out; set "
                "environment.sources.0.heldout"
            )
