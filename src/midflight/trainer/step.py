"""A step of the policy: its updates, from the tokens of a batch to new weights and a report.

    weights of version v, tokens  ->  an update for each mini-batch  ->  weights of version v + 1

One update: the factors of its tokens, where they must be known beforehand; then micro-batches, each
a forward and a backward that adds its share of the gradient; then a look at the alarms; then the
optimiser's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from midflight.errors import RunFailed
from midflight.trainer.critic import Critic
from midflight.trainer.formulas import diagnostics
from midflight.trainer.model.microbatch import Index, MicroBatch, dealt
from midflight.trainer.model.passes import Passes
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.objective import Denominators, Factors, Objective, TokenValues, count_tokens
from midflight.trainer.optimizer import Adam, clear_gradients, clipped_step
from midflight.trainer.report import StepRecord, StepReport, report_of, token_metrics
from midflight.trainer.schedule import Schedule
from midflight.trainer.tokens import LossTokens
from midflight.trainer.watch import StepWatch
from midflight.types import PackedBatch, Version


@dataclass(frozen=True, slots=True)
class StepRules:
    """The options of a step, and the conditions under which it is skipped."""

    updates_per_step: int = 1
    max_staleness: int = 4
    """The age in versions that a trained token may have at most (I2)."""
    on_alarm: Literal["warn", "skip", "stop"] = "warn"
    epochs_per_step: int = 1

    @property
    def num_updates(self) -> int:
        """The updates of a step, those of all its epochs."""
        return self.updates_per_step * self.epochs_per_step

    def mini_batches(self, tokens: LossTokens) -> list[Index]:
        """The tokens of each update of the step, in their order."""
        return tokens.mini_batches(self.updates_per_step) * self.epochs_per_step


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One of a step's mini-batches."""

    tokens: LossTokens
    chosen: Index
    """The numbers of the chosen tokens, ascending."""
    proximal: Float[Tensor, " K"] | None
    """Log-probabilities of all the step's tokens, or None if the proximal policy is the one that
    trains.
    """
    reference: Float[Tensor, " K"] | None
    progress: float
    """Share of the step's updates that were made before."""

    @property
    def where(self) -> Tensor:
        """`chosen`, on the tokens' device."""
        return torch.from_numpy(self.chosen).to(self.tokens.age.device)

    def position(self, at: Tensor) -> Tensor:
        """The places of the tokens `at` among the chosen ones."""
        return torch.searchsorted(self.where, at)

    def known(self, now: Tensor, proximal: Tensor, at: Tensor) -> TokenValues:
        """Returns the known values of the tokens `at`; `now` and `proximal` are already theirs."""
        t = self.tokens
        return TokenValues(
            now=now,
            proximal=proximal,
            behaviour=t.behaviour[at],
            advantage=t.advantage[at],
            age=t.age[at],
            sequence=t.rollout[at],
            num_sequences=t.num_rollouts,
            reference=None if self.reference is None else self.reference[at],
        )


class Stepper:
    """Updates a policy, and its critic if there is one. It is collective, as `Passes` is."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        policy: Passes,
        reference: Passes | None,
        critic: Critic | None,
        optimizer: AdamW,
        adam: Adam,
        schedule: Schedule,
        rules: StepRules,
        ranks: Ranks,
    ) -> None:
        """`policy` makes forwards of `model`, whose parameters `optimizer` moves. `reference` makes
        forwards of the model from which a divergence is taken.
        """
        self._model = model
        self._objective = objective
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._optimizer = optimizer
        self._adam = adam
        self._schedule = schedule
        self._rules = rules
        self._ranks = ranks
        self.watch: StepWatch | None = None
        """Told of each token of the steps, if somebody looks at them."""

    def learning_rate(self, number: int) -> float:
        """The learning rate of step 0, 1, 2, ..."""
        return self._adam.learning_rate * self._schedule.factor(number)

    @property
    def looks_beyond(self) -> bool:
        """True if a rank needs the values of tokens in rows that other ranks compute."""
        return self._objective.looks_beyond or self._critic is not None

    def shared(self, tokens: LossTokens) -> LossTokens:
        """The tokens, with a rank for each row. In each update the ranks have equal work in the
        tokens with a gradient, and in those without one.
        """
        if self._ranks.size == 1:
            return tokens
        predictions = tokens.predictions
        ranks = dealt(predictions, self._parts(tokens), size=self._ranks.size)
        return replace(tokens, predictions=replace(predictions, rank_of_row=ranks))

    def _parts(self, tokens: LossTokens) -> Iterator[Index]:
        for chosen in tokens.mini_batches(self._rules.updates_per_step):
            if self._critic is not None:  # it has yet to say which tokens have a gradient
                yield chosen
                continue
            live = self._live(tokens, chosen)
            yield chosen[live]
            yield chosen[~live]

    def take(
        self, batch: PackedBatch, tokens: LossTokens, *, number: int, version: Version
    ) -> StepReport:
        """Takes step 0, 1, 2, ..., which makes `version`, on the tokens of a batch."""
        if self.watch is not None:
            self.watch.begin(tokens)
        record, tokens = self.update(tokens, number=number, version=version)
        if self.watch is not None:
            self.watch.end(tokens, record)
        return report_of(
            record, batch, tokens, version=version, learning_rate=self.learning_rate(number)
        )

    # --- Updates ----------------------------------------------------------------------------------

    def update(
        self, tokens: LossTokens, *, number: int, version: Version
    ) -> tuple[StepRecord, LossTokens]:
        """Makes the updates of a step: of the policy, and of the critic if there is one. Returns
        the tokens with the advantages that were trained on.
        """
        rate = self.learning_rate(number)
        if self._critic is None or not tokens.num_tokens:
            return self._update_policy(tokens, version=version, learning_rate=rate), tokens
        judged = self._critic.judge(tokens)
        record = self._update_policy(judged.tokens, version=version, learning_rate=rate)
        record.critic = self._critic.learn(
            judged,
            self._rules.mini_batches(tokens),
            rate_factor=self._schedule.factor(number),
        )
        return record, judged.tokens

    def _update_policy(
        self, tokens: LossTokens, *, version: Version, learning_rate: float
    ) -> StepRecord:
        num_updates = self._rules.num_updates
        record = StepRecord.of(tokens, masks=tuple(self._objective.loss.masks))
        proximal = None
        if tokens.num_tokens and self._objective.needs_scores(updates_per_step=num_updates):
            proximal = self._policy.scores(tokens.predictions)
        reference = None
        if tokens.num_tokens and self._reference is not None:
            reference = self._reference.scores(tokens.predictions)
        chosen_of_update = self._rules.mini_batches(tokens)
        for number, chosen in enumerate(chosen_of_update):
            progress = number / len(chosen_of_update)
            update = Update(tokens, chosen, proximal, reference, progress)
            self._one_update(update, record, version=version, learning_rate=learning_rate)
        record.num_oversized = self._policy.num_oversized(tokens.predictions)
        clear_gradients(self._model)  # They would take a model's memory until the next step.
        return record

    def _one_update(
        self,
        update: Update,
        record: StepRecord,
        *,
        version: Version,
        learning_rate: float,
    ) -> None:
        clear_gradients(self._model)
        loss = self._accumulate(update, self._factors(update), record)
        alarms = self._alarms(record, update)
        record.alarms += [sentence for sentence in alarms if sentence not in record.alarms]
        if alarms and self._rules.on_alarm == "stop":
            raise RunFailed(
                f"step to version {version}: {'; '.join(alarms)}. The policy that trains "
                "is far from the one that sampled: lower the learning rate or max_staleness, look "
                "at mismatch/* in the metrics, or set trainer.on_alarm."
            )
        norm = math.nan
        held_back = bool(alarms) and self._rules.on_alarm == "skip"
        if math.isfinite(loss) and not held_back:
            norm = clipped_step(
                self._optimizer, learning_rate=learning_rate, max_norm=self._adam.max_grad_norm
            )
        record.updated(loss, norm, held_back=held_back)

    def _alarms(self, record: StepRecord, update: Update) -> tuple[str, ...]:
        """The alarms of an update. The first rank has the values of all tokens, and says them to
        the others.
        """
        if self._ranks.size == 1:
            return diagnostics.alarms(token_metrics(record, update.tokens, update.where))
        said = b""
        if self._ranks.is_first:
            found = diagnostics.alarms(token_metrics(record, update.tokens, update.where))
            said = msgspec.json.encode(found)
        return msgspec.json.decode(self._ranks.from_first(said), type=tuple[str, ...])

    def _factors(self, update: Update) -> Factors | None:
        """The factors of all the update's tokens, if the log-probabilities are known before the
        training forward; else None.
        """
        if update.proximal is None:
            return None
        now = update.proximal
        if self._objective.looks_beyond and update.progress > 0:
            now = self._policy.scores(update.tokens.predictions, update.chosen)
        where = update.where
        known = update.known(now[where], update.proximal[where], where)
        return self._objective.factors(known, progress=update.progress)

    # --- The gradient of an update ----------------------------------------------------------------

    def _accumulate(self, update: Update, whole: Factors | None, record: StepRecord) -> float:
        """Leaves the gradient of one update in the model and returns its loss."""
        tokens = update.tokens
        over = count_tokens(tokens.rollout[update.where], num_rollouts=tokens.num_rollouts)
        record.begin_update(update.where)
        total = self._add(update, whole, record, over=over)
        record.gather(update.where, self._ranks)
        return float(self._ranks.sum(total))

    def _add(
        self,
        update: Update,
        whole: Factors | None,
        record: StepRecord,
        *,
        over: Denominators,
    ) -> Float[Tensor, ""]:
        """Adds the gradient of the update's tokens to the one in the model; returns this rank's
        share of their loss.

        Tokens of advantage 0 have a gradient of exactly 0 under most objectives: they get a forward
        for the diagnostics and no backward.
        """
        tokens = update.tokens
        chosen = update.chosen
        live = self._live(tokens, chosen)
        total = tokens.behaviour.new_zeros(())
        with_entropy = self._objective.entropy_coefficient > 0
        for part, trains in ((chosen[live], True), (chosen[~live], False)):
            for micro, is_mine, policy, entropy in self._policy.forwards(
                tokens.predictions, part, trains=trains, with_entropy=with_entropy
            ):
                if not is_mine:
                    if trains:
                        (policy.sum() * 0).backward()
                    continue
                if self.watch is not None:
                    self.watch.forward(micro.predictions, policy)
                share = self._share(update, micro, policy, entropy, whole, over=over, record=record)
                if trains:
                    share.backward()
                total += share.detach()
                record.num_micro_batches += 1
        return total

    def _live(self, tokens: LossTokens, chosen: Index) -> NDArray[np.bool_]:
        """True at the chosen tokens that may have a gradient."""
        if not self._objective.needs_advantage:
            return np.ones(len(chosen), np.bool_)
        return tokens.advantage.cpu().numpy()[chosen] != 0

    def _share(
        self,
        update: Update,
        micro: MicroBatch,
        policy: Float[Tensor, " k"],
        entropy: Float[Tensor, " k"] | None,
        whole: Factors | None,
        *,
        over: Denominators,
        record: StepRecord,
    ) -> Float[Tensor, ""]:
        """The part that a micro-batch has in the loss."""
        at = micro.predictions
        now = policy.detach()
        proximal = now if update.proximal is None else update.proximal[at]
        known = update.known(now, proximal, at)
        if whole is None:
            factors = self._objective.factors(known, progress=update.progress)
        else:
            factors = whole.at(update.position(at))
        found = self._objective.token_losses(policy, known, factors, entropy=entropy)
        record.note(at, factors, found, known, self._objective)
        return self._objective.reduce(found.loss, update.tokens.rollout[at], over=over)
