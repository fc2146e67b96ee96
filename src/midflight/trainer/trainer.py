"""The trainer of the policy: a batch in, a version out.

It is synchronous. Its caller does the waiting for batches.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import msgspec
import torch
from transformers import PreTrainedModel

from midflight.config.sections import Config
from midflight.errors import RunFailed
from midflight.trainer.credit import Scoring, scoring_of
from midflight.trainer.critic import Critic, Valuation, value_model_of
from midflight.trainer.model.layers import compile_layers, recompute_activations
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.model.passes import Passes
from midflight.trainer.model.policy import Policy, TokenModel, TriedOut, check_fits, try_out
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.model.sharding import shard
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam, adamw
from midflight.trainer.own_loss import objective_of
from midflight.trainer.own_rows import decode_own_rows, encode_own_rows
from midflight.trainer.parking import park, unpark
from midflight.trainer.report import StepReport
from midflight.trainer.schedule import Schedule
from midflight.trainer.step import Stepper, StepRules
from midflight.trainer.tokens import MAX_MISSING_SHARE, LossTokens, step_tokens
from midflight.trainer.watch import StepWatch
from midflight.types import PackedBatch, Version
from midflight.types.digests import StepChain


@dataclass(frozen=True, slots=True)
class Fork:
    """A point at which a run was taken up again: the weights of `parent` go on under the number
    `version`, so that no number is used twice.
    """

    parent: Version
    version: Version


@dataclass(frozen=True, slots=True)
class Scale:
    """The options that fit a step into memory and time. They do not change its results, apart from
    rounding.
    """

    micro_batch_tokens: int = 2048
    compute_dtype: torch.dtype | None = None
    """Precision of forward and backward; None is that of the weights."""
    layout: Layout = Layout.PACKED
    """The layout of rows in a micro-batch. The model must be right in it
    (`trainer.model.probe`).
    """
    activation_checkpointing: bool = False
    compile: bool = False
    routing_replay: bool = False
    """True if tokens of a mixture go to the experts that an engine recorded; not in compiled
    layers.
    """


class PolicyTrainer:
    """Owns model, optimiser and the count of versions. One step makes one version, also when it is
    skipped: the admission of new groups follows the version, and a step that gave none would stop
    it.

    With several ranks each has a trainer, and all take the same steps. The first has the whole
    batch, and each of the others its own rows, see `own_rows`. What the ranks compute is made whole
    on every rank, so that each decides alike.
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
        device: torch.device | None = None,
    ) -> None:
        """`reference` is the model that a divergence is taken from; without one it is `model` as it
        is now. `valuation` gives the options of a critic, for generalised advantages.

        `device` computes, by default the one that has the model. With several ranks a model may be
        elsewhere before it is shared (see `shard`).
        """
        assert (valuation is not None) == (scoring.advantage == "gae"), (
            "a critic is there for generalised advantages, and for nothing else"
        )
        scale = scale or Scale()
        rules = rules or StepRules()
        self.ranks = ranks or Ranks()
        self.model = model
        self.objective = objective
        self.version = version
        self.num_steps = 0
        """Steps since the first version: the schedule's clock, which a fork does not advance."""
        self.num_skipped = 0
        self.lineage: tuple[Fork, ...] = ()
        self.chain = StepChain()
        """The digests of the steps, which whoever takes the batches adds."""
        self._scoring = scoring
        self._rules = rules
        like = next(model.parameters())
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._device = device or like.device
        passes_of_reference: Passes | None = None
        if objective.kl_coefficient:
            held = (reference or copy.deepcopy(model)).requires_grad_(False)
            passes_of_reference = self._passes(
                self._policy(held, scale.layout), scale, temperature, trains=False
            )
        # The critic's model is a copy, and is made before the layers are changed.
        judge = None if valuation is None else value_model_of(model, scale.layout)
        policy = self._policy(model, scale.layout, replays=scale.routing_replay)
        passes_of_policy = self._passes(policy, scale, temperature)
        self.optimizer = adamw(
            model,
            learning_rate=adam.learning_rate,
            betas=adam.betas,
            weight_decay=adam.weight_decay,
        )
        self.critic: Critic | None = None
        if judge is not None and valuation is not None:
            passes_of_critic = self._passes(judge, scale, temperature)
            self.critic = Critic(passes_of_critic, valuation, adam=adam, ranks=self.ranks)
        self._stepper = Stepper(
            model,
            objective,
            policy=passes_of_policy,
            reference=passes_of_reference,
            critic=self.critic,
            optimizer=self.optimizer,
            adam=adam,
            schedule=schedule,
            rules=rules,
            ranks=self.ranks,
        )

    def _policy(self, model: PreTrainedModel, layout: Layout, *, replays: bool = False) -> Policy:
        """The policy of a model. With several ranks the first one tries the model out, because the
        others may have no numbers of it yet.
        """
        if self.ranks.size == 1:
            return Policy(model, layout, replays=replays)
        told = b""
        if self.ranks.is_first:
            told = msgspec.json.encode(try_out(model, replays=replays))
        tried = msgspec.json.decode(self.ranks.from_first(told), type=TriedOut)
        return Policy(model, layout, tried=tried)

    def _passes(
        self, reader: TokenModel, scale: Scale, temperature: float, *, trains: bool = True
    ) -> Passes:
        if trains and scale.activation_checkpointing:
            recompute_activations(reader.model)
        if scale.compile:
            compile_layers(reader.model)
        shard(reader, self.ranks, compute_dtype=scale.compute_dtype, device=self._device)
        return Passes(
            reader,
            self.ranks,
            budget=scale.micro_batch_tokens,
            temperature=temperature,
            compute_dtype=scale.compute_dtype,
            device=self._device,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._stepper.learning_rate(self.num_steps)

    def leave_device(self) -> None:
        """Moves moments and gradients to host memory until `take_device`; the weights stay. A
        checkpoint may be staged meanwhile, but no step be made.
        """
        park(self.model, self.optimizer)
        if self.critic is not None:
            park(self.critic.model, self.critic.optimizer)

    def take_device(self) -> None:
        """Brings moments and gradients back. Idempotent."""
        unpark(self.optimizer)
        if self.critic is not None:
            unpark(self.critic.optimizer)

    def watch(self) -> StepWatch:
        """Begins to keep the values of each token of the newest step."""
        self._stepper.watch = StepWatch()
        return self._stepper.watch

    def step(self, batch: PackedBatch) -> StepReport:
        """Trains on a batch leased for the current version and makes the next one."""
        return self.train_on(batch, self.tokens_of(batch))

    def tokens_of(self, batch: PackedBatch) -> LossTokens:
        """The tokens of a batch that are in the loss, with a rank for each row."""
        self._check_version(batch.train_version)
        check_fits(batch, self.model)
        tokens = step_tokens(
            batch,
            self._scoring,
            max_staleness=self._rules.max_staleness,
            max_missing_share=MAX_MISSING_SHARE,
            dtype=self._dtype,
            device=self._device,
        )
        return self._stepper.shared(tokens)

    def train_on(self, batch: PackedBatch, tokens: LossTokens) -> StepReport:
        """Makes the next version from the batch, whose tokens are `tokens`."""
        report = self._stepper.take(batch, tokens, number=self.num_steps, version=self.version + 1)
        self._stepped(skipped=report.skipped is not None)
        return report

    def rows_of_rank(self, tokens: LossTokens, rank: int) -> bytes:
        """Encodes the rows of a rank, from which it makes the same step (`follow`)."""
        return encode_own_rows(
            tokens, rank, version=self.version, looks_beyond=self._stepper.looks_beyond
        )

    def follow(self, rows: bytes) -> None:
        """Makes the step that the first rank makes, from this rank's own rows."""
        own = decode_own_rows(rows)
        self._check_version(own.version)
        tokens = own.tokens(self.ranks.rank, dtype=self._dtype, device=self._device)
        record, _ = self._stepper.update(tokens, number=self.num_steps, version=self.version + 1)
        self._stepped(skipped=record.skipped is not None)

    def _check_version(self, leased: Version) -> None:
        if leased != self.version:
            raise RunFailed(
                f"the batch is leased for version {leased}, the trainer is at {self.version}. "
                "Lease a batch for it."
            )

    def _stepped(self, *, skipped: bool) -> None:
        self.version += 1
        self.num_steps += 1
        self.num_skipped += skipped


def trainer_of(
    config: Config,
    model: PreTrainedModel,
    *,
    layout: Layout = Layout.PACKED,
    reference: PreTrainedModel | None = None,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> PolicyTrainer:
    """The trainer that a configuration asks for. The model must be right in `layout`. See
    `PolicyTrainer` for `device`.
    """
    section = config.trainer
    compute_dtype = torch.bfloat16 if section.compute_dtype == "bfloat16" else None
    valuation: Valuation | None = None
    if config.objective.advantage == "gae":
        c = config.critic
        valuation = Valuation(c.learning_rate, c.discount, c.trace_decay, c.clip)
    return PolicyTrainer(
        model,
        objective_of(config),
        scoring=scoring_of(config),
        schedule=Schedule(
            kind=section.schedule, warmup_steps=section.warmup_steps, total_steps=config.run.steps
        ),
        adam=Adam(
            section.learning_rate,
            betas=(0.9, section.adam_beta2),
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
        ),
        scale=Scale(
            micro_batch_tokens=section.micro_batch_tokens,
            compute_dtype=compute_dtype,
            activation_checkpointing=section.activation_checkpointing,
            compile=section.compile,
            layout=layout,
            routing_replay=config.correction.routing_replay and not section.compile,
        ),
        reference=reference,
        valuation=valuation,
        rules=StepRules(
            section.updates_per_step,
            config.rollout.max_staleness,
            section.on_alarm,
            section.epochs_per_step,
        ),
        temperature=config.environment.temperature,
        ranks=ranks,
        device=device,
    )
