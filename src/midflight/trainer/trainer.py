"""The trainer: a batch in, a version out; and supervised fine-tuning on prompts and answers, the
warm start before reinforcement learning. Synchronous; whoever feeds it does the waiting.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.errors import RunFailed, StepSkipped
from midflight.trainer import step as steps
from midflight.trainer.credit import Scoring, scoring_of
from midflight.trainer.critic import Critic, Valuation, value_model_of
from midflight.trainer.early import Ahead, EarlyWork, Part, found_in
from midflight.trainer.formulas import diagnostics
from midflight.trainer.model.layers import compile_layers, recompute_activations
from midflight.trainer.model.microbatch import (
    Example,
    Index,
    Layout,
    MicroBatch,
    answer_predictions,
    split,
)
from midflight.trainer.model.policy import Passes, Policy, Ranks, TokenModel, check_fits, shard
from midflight.trainer.objective import Denominators, Factors, Objective, count_tokens
from midflight.trainer.own_loss import objective_of
from midflight.trainer.step import (
    Adam,
    LossTokens,
    Schedule,
    StepRecord,
    StepReport,
    Update,
    adamw,
    clear_gradients,
    clipped_step,
)
from midflight.types import PackedBatch, Version


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a run was taken up again: weights of `parent` go on under the number `version`, so that
    no number is used twice.
    """

    parent: Version
    version: Version


@dataclass(frozen=True, slots=True)
class Scale:
    """How a step is fitted into memory and time. None of it changes what is computed, but for
    rounding.
    """

    micro_batch_tokens: int = 4096
    compute_dtype: torch.dtype | None = None
    """Precision of forward and backward; None is that of the weights."""
    layout: Layout = Layout.PACKED
    """How rows lie in a micro-batch: one in which the model is right (`trainer.model.probe`)."""
    activation_checkpointing: bool = False
    compile: bool = False
    routing_replay: bool = False
    """Whether tokens of a mixture go to the experts that an engine recorded; not in compiled
    layers.
    """

    @property
    def by_modules(self) -> bool:
        """Whether something is done to the model's modules, which a plain family then goes through
        like any other.
        """
        return self.activation_checkpointing or self.compile or self.compute_dtype is not None


@dataclass(frozen=True, slots=True)
class StepRules:
    """What a step takes, and when it is not made."""

    updates_per_step: int = 1
    max_staleness: int = 4
    """Versions that a trained token may be old (I2)."""
    max_missing_share: float = 0.1
    """The largest share of a batch's tokens that may come without a log-probability."""
    on_alarm: Literal["warn", "skip", "stop"] = "warn"


class PolicyTrainer:
    """Owns model, optimiser and the count of versions. One step makes one version, also when it is
    skipped: the admission of new groups follows the version, and a step that gave none would stop
    it.

    With several ranks each has a trainer, and all take the same steps with the same batches: each
    computes its share of the micro-batches, and what is known of the whole batch is made whole on
    every rank, so that each decides alike.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        *,
        scoring: Scoring,
        schedule: Schedule,
        adam: Adam,
        scale: Scale | None = None,
        reference: PreTrainedModel | None = None,
        valuation: Valuation | None = None,
        rules: StepRules | None = None,
        temperature: float = 1.0,
        version: Version = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """`reference`: what a divergence is taken from; none is `model` as it is now. `valuation`:
        of the critic, for generalised advantages.
        """
        assert (valuation is not None) == (scoring.advantage == "gae"), (
            "a critic is there for generalised advantages, and for nothing else"
        )
        scale = scale or Scale()
        self.ranks = ranks or Ranks()
        self.model = model
        self.objective = objective
        self.version = version
        self.num_steps = 0
        """Steps since the first version: the schedule's clock, which a fork does not advance."""
        self.num_skipped = 0
        self.lineage: tuple[Fork, ...] = ()
        self._scoring = scoring
        self._schedule = schedule
        self._adam = adam
        self._rules = rules or StepRules()
        like = next(model.parameters())
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._device = like.device
        self._reference: Passes | None = None
        if objective.kl_coefficient:
            held = (reference or copy.deepcopy(model)).requires_grad_(False)
            self._reference = self._passes(
                self._policy(held, scale), scale, temperature, trains=False
            )
        # a copy, made before the layers are changed
        judge = None if valuation is None else value_model_of(model, scale.layout)
        self._passes_of_policy = self._passes(
            self._policy(model, scale, replays=scale.routing_replay), scale, temperature
        )
        self.optimizer = adamw(
            model,
            learning_rate=adam.learning_rate,
            betas=adam.betas,
            weight_decay=adam.weight_decay,
        )
        self._ahead, self._begun = (
            Ahead.of(
                objective, scoring, updates=self._rules.updates_per_step, ranks=self.ranks.size
            ),
            list[Part](),
        )
        self.critic: Critic | None = None
        if judge is not None and valuation is not None:
            self.critic = Critic(
                self._passes(judge, scale, temperature), valuation, adam=adam, ranks=self.ranks
            )

    def _policy(self, model: PreTrainedModel, scale: Scale, *, replays: bool = False) -> Policy:
        return Policy(
            model,
            scale.layout,
            replays=replays,
            by_hand=self.ranks.size == 1 and not scale.by_modules,
        )

    def _passes(
        self, reader: TokenModel, scale: Scale, temperature: float, *, trains: bool = True
    ) -> Passes:
        if trains and scale.activation_checkpointing:
            recompute_activations(reader.model)
        if scale.compile:
            compile_layers(reader.model)
        shard(reader, self.ranks, compute_dtype=scale.compute_dtype)
        budget = scale.micro_batch_tokens
        dtype = scale.compute_dtype
        return Passes(
            reader,
            self.ranks,
            budget=budget,
            temperature=temperature,
            compute_dtype=dtype,
            device=self._device,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._adam.learning_rate * self._schedule.factor(self.num_steps)

    @property
    def early_tokens(self) -> int:
        """Of groups that are worth `begin`: a micro-batch, so that nothing is computed in smaller
        pieces than with the whole batch. 0: nothing can be done early."""
        return self._passes_of_policy.budget if self._ahead.any else 0

    def begin(self, groups: PackedBatch) -> None:
        """Does for some groups, which the next batch is expected to have, what can be done without
        the others; see `early`.
        """
        check_fits(groups, self.model)
        tokens = self._tokens(groups, max_missing_share=1.0)
        if not tokens.num_tokens:
            return
        record = StepRecord.of(tokens, masks=tuple(self.objective.loss.masks))
        proximal = self._passes_of_policy.scores(tokens.predictions) if self._ahead.scores else None
        reference = (
            self._reference.scores(tokens.predictions) if self._reference is not None else None
        )
        loss = 0.0
        if self._ahead.gradient:
            if not self._begun:
                clear_gradients(self.model)
            everything = np.arange(tokens.num_tokens)
            over = replace(
                count_tokens(tokens.rollout, num_rollouts=tokens.num_rollouts),
                num_tokens=1,
                num_rollouts=1,
            )
            loss = float(
                self._add(
                    Update(tokens, everything, None, reference, 0.0),
                    everything,
                    None,
                    record,
                    over=over,
                )
            )
        self._begun.append(Part(tokens, record, loss, proximal, reference))

    def step(self, batch: PackedBatch) -> StepReport:
        """Trains on a batch leased for the current version and makes the next one."""
        if batch.train_version != self.version:
            raise RunFailed(
                f"the batch is leased for version {batch.train_version}, the trainer is at "
                f"{self.version}. Lease a batch for it."
            )
        check_fits(batch, self.model)
        tokens = self._tokens(batch, max_missing_share=self._rules.max_missing_share)
        record, tokens = self._update_all(tokens)
        report = steps.report_of(
            record, batch, tokens, version=self.version + 1, learning_rate=self.learning_rate
        )
        self.version = report.version
        self.num_steps = self.num_steps + 1
        self.num_skipped += report.skipped is not None
        return report

    def _tokens(self, batch: PackedBatch, *, max_missing_share: float) -> LossTokens:
        return steps.step_tokens(
            batch,
            self._scoring,
            max_staleness=self._rules.max_staleness,
            max_missing_share=max_missing_share,
            dtype=self._dtype,
            device=self._device,
        )

    # --- Updates ----------------------------------------------------------------------------------

    def _update_all(self, tokens: LossTokens) -> tuple[StepRecord, LossTokens]:
        """The policy, and the critic if there is one. Returns the tokens with the advantages that
        were trained on.
        """
        if self.critic is None or not tokens.num_tokens:
            return self._update(tokens), tokens
        judged = self.critic.judge(tokens)
        record = self._update(judged.tokens)
        factor = self._schedule.factor(self.num_steps)
        record.critic = self.critic.learn(
            judged, tokens.mini_batches(self._rules.updates_per_step), rate_factor=factor
        )
        return record, judged.tokens

    def _update(self, tokens: LossTokens) -> StepRecord:
        record = StepRecord.of(tokens, masks=tuple(self.objective.loss.masks))
        proximal = None
        reference = None
        begun = found_in(tokens, self._begun, self._ahead)
        self._begun = []
        begun.note(record)
        if tokens.num_tokens and self.objective.needs_scores(
            updates_per_step=self._rules.updates_per_step
        ):
            proximal = begun.scores(self._passes_of_policy, tokens, "proximal")
        if tokens.num_tokens and self._reference is not None:
            reference = begun.scores(self._reference, tokens, "reference")
        chosen_of_update = tokens.mini_batches(self._rules.updates_per_step)
        for number, chosen in enumerate(chosen_of_update):
            update = Update(
                tokens, chosen, proximal, reference, progress=number / len(chosen_of_update)
            )
            self._one_update(update, record, begun)
        record.num_oversized = self._passes_of_policy.num_oversized(tokens.predictions)
        clear_gradients(self.model)  # They would take a model's memory until the next step.
        return record

    def _one_update(self, update: Update, record: StepRecord, begun: EarlyWork) -> None:
        if not begun.gradient:
            clear_gradients(self.model)
        loss = self._accumulate(update, self._factors(update), record, begun)
        alarms = diagnostics.alarms(steps.token_metrics(record, update.tokens, update.where))
        record.alarms += [sentence for sentence in alarms if sentence not in record.alarms]
        if alarms and self._rules.on_alarm == "stop":
            raise RunFailed(
                f"step to version {self.version + 1}: {'; '.join(alarms)}. The policy that trains "
                "is far from the one that sampled: lower the learning rate or max_staleness, look "
                "at mismatch/* in the metrics, or set trainer.on_alarm."
            )
        norm = math.nan
        held_back = bool(alarms) and self._rules.on_alarm == "skip"
        if math.isfinite(loss) and not held_back:
            norm = clipped_step(
                self.optimizer, learning_rate=self.learning_rate, max_norm=self._adam.max_grad_norm
            )
        record.updated(loss, norm, held_back=held_back)

    def _factors(self, update: Update) -> Factors | None:
        """The factors of all the update's tokens, where the log-probabilities are known before the
        training forward; else None.
        """
        if update.proximal is None:
            return None
        now = update.proximal
        if self.objective.looks_beyond and update.progress > 0:
            now = self._passes_of_policy.scores(update.tokens.predictions, update.chosen)
        where = update.where
        return self.objective.factors(
            update.known(now[where], update.proximal[where], where), progress=update.progress
        )

    def _accumulate(
        self, update: Update, whole: Factors | None, record: StepRecord, begun: EarlyWork
    ) -> float:
        """Leaves the gradient of one update in the model and returns its loss."""
        over = count_tokens(
            update.tokens.rollout[update.where], num_rollouts=update.tokens.num_rollouts
        )
        early = 0.0
        if begun.gradient:
            factor = self.objective.over_ones(over)
            steps.scale_gradients(self.model, factor)
            early = factor * begun.loss
        total = self._add(update, begun.left(update.chosen), whole, record, over=over)
        record.gather(update.where, self.ranks)
        return early + float(self.ranks.sum(total))

    def _add(
        self,
        update: Update,
        chosen: Index,
        whole: Factors | None,
        record: StepRecord,
        *,
        over: Denominators,
    ) -> Float[Tensor, ""]:
        """Adds the gradient of the `chosen` tokens to what is in the model; returns this rank's
        share of their loss.

        Tokens of advantage 0 have a gradient of exactly 0 under most objectives: they get a forward
        for the diagnostics and no backward.
        """
        tokens = update.tokens
        live = (
            tokens.advantage.cpu().numpy()[chosen] != 0
            if self.objective.needs_advantage
            else np.ones(len(chosen), np.bool_)
        )
        total = torch.zeros((), dtype=self._dtype, device=self._device)
        with_entropy = self.objective.entropy_coefficient > 0
        for part, trains in ((chosen[live], True), (chosen[~live], False)):
            for micro, is_mine, policy, entropy in self._passes_of_policy.forwards(
                tokens.predictions, part, trains=trains, with_entropy=with_entropy
            ):
                share = self._share(
                    update,
                    micro,
                    policy,
                    entropy,
                    whole,
                    over=over,
                    record=record if is_mine else None,
                )
                if trains:
                    (share if is_mine else share * 0).backward()
                if is_mine:
                    total += share.detach()
                    record.num_micro_batches += 1
        return total

    def _share(
        self,
        update: Update,
        micro: MicroBatch,
        policy: Float[Tensor, " k"],
        entropy: Float[Tensor, " k"] | None,
        whole: Factors | None,
        *,
        over: Denominators,
        record: StepRecord | None,
    ) -> Float[Tensor, ""]:
        """A micro-batch's part of the loss."""
        at = micro.predictions
        now = policy.detach()
        known = update.known(now, now if update.proximal is None else update.proximal[at], at)
        factors = (
            self.objective.factors(known, progress=update.progress)
            if whole is None
            else whole.at(update.position(at))
        )
        found = self.objective.token_losses(policy, known, factors, entropy=entropy)
        if record is not None:
            record.note(at, factors, found, known, self.objective)
        return self.objective.reduce(found.loss, update.tokens.rollout[at], over=over)


def trainer_of(
    config: Config,
    model: PreTrainedModel,
    *,
    layout: Layout = Layout.PACKED,
    reference: PreTrainedModel | None = None,
    ranks: Ranks | None = None,
) -> PolicyTrainer:
    """The trainer a configuration asks for. `layout`: one in which the model is right."""
    section = config.trainer
    c = config.critic
    return PolicyTrainer(
        model,
        objective_of(config),
        scoring=scoring_of(config),
        schedule=Schedule(
            kind=section.schedule, warmup_steps=section.warmup_steps, total_steps=config.run.steps
        ),
        adam=Adam(
            section.learning_rate,
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
        ),
        scale=Scale(
            micro_batch_tokens=section.micro_batch_tokens,
            compute_dtype=torch.bfloat16 if section.compute_dtype == "bfloat16" else None,
            activation_checkpointing=section.activation_checkpointing,
            compile=section.compile,
            layout=layout,
            routing_replay=config.correction.routing_replay and not section.compile,
        ),
        reference=reference,
        valuation=Valuation(c.learning_rate, c.discount, c.trace_decay, c.clip)
        if config.objective.advantage == "gae"
        else None,
        rules=StepRules(
            section.updates_per_step,
            config.rollout.max_staleness,
            section.max_missing_share,
            section.on_alarm,
        ),
        temperature=config.environment.temperature,
        ranks=ranks,
    )


# --- Supervised fine-tuning -----------------------------------------------------------------------


class SupervisedTrainer:
    """Minimises the mean negative log-probability of answer tokens. Has an optimiser of its own,
    gone with it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        schedule: Schedule | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 4096,
        layout: Layout = Layout.PACKED,
    ) -> None:
        self.model = model
        self._policy = Policy(model, layout)
        self.num_steps = 0
        self._optimizer = adamw(
            model, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )
        self._schedule = schedule or Schedule()
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._budget = micro_batch_tokens

    def step(self, examples: Sequence[Example]) -> float:
        """One update on these examples; returns their loss in nats per answer token. `StepSkipped`
        if it is not finite.
        """
        predictions = answer_predictions(examples)
        device = next(self.model.parameters()).device
        clear_gradients(self.model)
        total = 0.0
        for micro in split(
            predictions,
            np.arange(len(predictions.targets)),
            budget=self._budget,
            device=device,
            layout=self._policy.layout,
        ):
            loss = -self._policy(micro, temperature=1.0)[0].sum() / len(predictions.targets)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        rate = self._learning_rate * self._schedule.factor(self.num_steps)
        norm = clipped_step(self._optimizer, learning_rate=rate, max_norm=self._max_grad_norm)
        self.num_steps += 1
        if not np.isfinite([total, norm]).all():
            raise StepSkipped(
                f"supervised step {self.num_steps}: loss {total}, gradient norm {norm}. Lower "
                "warm_start.learning_rate."
            )
        return total
