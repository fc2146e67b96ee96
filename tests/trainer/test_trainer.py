from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from midflight.config.load import load_config
from midflight.errors import RunFailed
from midflight.trainer.credit import Scoring
from midflight.trainer.model.attention import Runs, attend_raggedly, packed_runs
from midflight.trainer.optimizer import clear_gradients, clipped_step
from midflight.trainer.report import Skip
from midflight.trainer.schedule import Schedule
from midflight.trainer.tokens import step_tokens
from midflight.trainer.trainer import trainer_of
from midflight.types import PackedBatch, Reason

from .fixtures import batch, tiny_model, trainer, weights


def trained_positions(data: PackedBatch) -> np.ndarray:
    return np.flatnonzero(data.loss_mask)


def test_one_step_makes_one_version() -> None:
    ours = trainer(tiny_model())
    assert [ours.step(batch(version=v)).version for v in range(3)] == [1, 2, 3]
    assert ours.version == 3


def test_a_batch_leased_for_another_version_is_refused() -> None:
    with pytest.raises(RunFailed, match="leased for version 4, the trainer is at 0"):
        trainer(tiny_model()).step(batch(version=4))


@pytest.mark.parametrize("versions", [2, 6])
def test_i2_a_token_too_old_or_from_the_future_is_never_trained(versions: int) -> None:
    data = batch(version=5)
    data.versions[trained_positions(data)[3]] = versions
    model = tiny_model()
    before = weights(model)
    with pytest.raises(RunFailed, match="I2"):
        trainer(model, version=5, max_staleness=2).step(data)
    assert torch.equal(weights(model), before)


def test_i2_the_age_of_context_does_not_matter() -> None:
    data = batch(version=5)
    data.versions[~data.loss_mask] = 0
    assert trainer(tiny_model(), version=5, max_staleness=0).step(data).skipped is None


def test_learning_raises_the_probability_of_rewarded_answers() -> None:
    ours = trainer(tiny_model(), learning_rate=3e-3)
    losses = [ours.step(replace(batch(), train_version=v, versions=batch().versions + v)).loss for v in range(8)]
    assert losses[-1] < losses[0] - 0.1


def test_missing_log_probabilities_are_masked_and_counted() -> None:
    data = batch()
    where = trained_positions(data)[[0, 5, 9]]
    data.logprobs[where] = [np.nan, -9999.0, 0.5]
    report = trainer(tiny_model()).step(data)
    assert report.masked == {Reason.NOT_FINITE: 3}
    assert report.num_tokens == data.loss_mask.sum() - 3
    assert np.isfinite(report.loss) and report.skipped is None


def test_too_many_missing_log_probabilities_end_the_run() -> None:
    data = batch()
    data.logprobs[:] = np.nan
    with pytest.raises(RunFailed, match="without a log-probability"):
        trainer(tiny_model()).step(data)


def test_a_reward_that_is_not_a_number_gets_no_advantage_and_is_no_part_of_the_baseline() -> None:
    data, without = batch(), batch()
    data.rewards[5] = np.nan
    rows = np.repeat(data.row_rollout, np.diff(data.row_offsets))
    report = trainer(tiny_model()).step(data)
    assert report.masked == {Reason.NO_REWARD: int((data.loss_mask & (rows == 5)).sum())}
    # Rollout 5 alone in a group of its own leaves the others as they are: the same baseline, its own advantage 0.
    alone = replace(without, rollout_group=np.where(np.arange(12) == 5, 3, without.rollout_group).astype(np.int32))
    assert report.loss * report.num_tokens == pytest.approx(trainer(tiny_model()).step(alone).loss * data.loss_mask.sum(), rel=1e-9)


def test_a_batch_without_a_token_to_train_is_a_counted_skip() -> None:
    data, model = batch(), tiny_model()
    before = weights(model)
    ours = trainer(model)
    report = ours.step(replace(data, loss_mask=np.zeros_like(data.loss_mask)))
    assert (report.version, report.skipped, report.num_tokens, ours.num_skipped) == (1, Skip.NO_TOKENS, 0, 1)
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_weights_and_moments_and_is_counted(broken: str) -> None:
    model = tiny_model()
    ours = trainer(model)
    ours.step(batch())
    before = weights(model)
    parameter = next(p for name, p in model.named_parameters() if name.endswith("down_proj.weight"))
    moment = ours.optimizer.state[parameter]["exp_avg"].clone()
    if broken == "loss":
        handle = model.model.norm.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
    else:
        handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    report = ours.step(batch(version=1))
    handle.remove()
    assert (report.version, report.skipped, report.num_tokens) == (2, Skip.NOT_FINITE, 0)
    assert torch.equal(weights(model), before) and torch.equal(ours.optimizer.state[parameter]["exp_avg"], moment)
    assert ours.step(batch(version=2)).skipped is None
    assert ours.num_skipped == 1


def test_one_update_of_several_may_be_skipped_without_the_step() -> None:
    model = tiny_model()
    ours = trainer(model, updates_per_step=3)
    parameter = next(p for name, p in model.named_parameters() if name.endswith("down_proj.weight"))
    calls: list[int] = []

    def break_the_first(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * (float("inf") if len(calls) == 1 else 1.0)

    parameter.register_hook(break_the_first)
    report = ours.step(batch())
    assert report.skipped is None and report.metrics["step/updates_skipped"] == 1
    assert np.isfinite([report.loss, report.metrics["grad_norm"]]).all()


def test_rollouts_that_were_cut_short_stay_out_of_the_loss_where_that_is_asked_and_their_rewards_count() -> None:
    data = batch()
    data.truncated[5] = True
    of_it = np.repeat(data.row_rollout, np.diff(data.row_offsets)) == 5
    report = trainer(tiny_model(), scoring=Scoring(mask_truncated=True)).step(data)
    assert report.masked == {Reason.TRUNCATED: int(data.loss_mask[of_it].sum())}
    assert report.metrics["masked/truncated"] > 0 and report.metrics["reward/mean"] == pytest.approx(float(data.rewards.mean()))
    assert not trainer(tiny_model()).step(data).masked


def test_the_overlong_penalty_goes_by_what_the_answer_nearest_to_its_limit_left_and_not_by_the_length_of_all_turns() -> None:
    """A rollout of 20 tokens, and limits of 8 for each answer: without `room` nobody could tell whether one was cut short."""
    scoring = Scoring("dr_grpo", overlong_buffer=4)
    rewards, room = torch.ones(3, dtype=torch.float64), torch.tensor([0, 2, 2**31 - 1])
    found = scoring.advantages(rewards, torch.zeros(3).long(), room=room, earned=torch.zeros(3, 0).double(), components={})
    assert found[:, 0].tolist() == pytest.approx([-0.5, 0.0, 0.5])  # penalties of 1, 0.5 and 0 less their mean
    with pytest.raises(RunFailed, match="room"):
        trainer(tiny_model(), scoring=scoring).step(batch())


def test_a_batch_without_rows_is_a_skip_too() -> None:
    nothing, empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    none = np.zeros(0, np.bool_)
    report = trainer(tiny_model()).step(
        PackedBatch(1, 0, nothing, none, empty, nothing, nothing, np.zeros(1, np.int32), nothing, empty, nothing, none)
    )
    assert (report.version, report.skipped, dict(report.masked)) == (1, Skip.NO_TOKENS, {})


def test_rollouts_of_no_advantage_change_neither_loss_nor_weights() -> None:
    # They skip the backward pass; without them the token mean has a smaller denominator, and that is all.
    data = batch()
    data.rewards[:4] = 1.0
    rows = np.repeat(data.row_rollout, np.diff(data.row_offsets))
    one, other = tiny_model(), tiny_model()
    full = trainer(one).step(data)
    part = trainer(other).step(replace(data, loss_mask=data.loss_mask & (rows >= 4)))
    assert full.loss * full.num_tokens == pytest.approx(part.loss * part.num_tokens, rel=1e-12)
    assert full.num_tokens > part.num_tokens
    # AdamW's first step is the same for any scale of the gradient.
    assert torch.allclose(weights(one), weights(other), atol=1e-6)


def test_several_updates_use_the_proximal_policy_of_the_start_of_the_step() -> None:
    data, model = batch(), tiny_model()
    ours = trainer(model, updates_per_step=3, learning_rate=0.05)
    single = trainer(tiny_model()).step(data)
    report = ours.step(data)
    # rho is proximal / behaviour: the same as of one update, although the weights moved between updates.
    assert report.metrics["rho/mean"] == pytest.approx(single.metrics["rho/mean"], rel=1e-12)
    assert report.metrics["clip/low_share"] + report.metrics["clip/high_share"] > 0
    assert single.metrics["clip/low_share"] == single.metrics["clip/high_share"] == 0
    assert report.version == 1


def test_epochs_of_a_step_train_on_its_batch_again_with_the_proximal_policy_of_the_start() -> None:
    data, model, once = batch(), tiny_model(), tiny_model()
    report = trainer(model, epochs_per_step=3, learning_rate=0.05).step(data)
    single = trainer(once, learning_rate=0.05).step(data)
    assert report.metrics["rho/mean"] == pytest.approx(single.metrics["rho/mean"], rel=1e-12)
    assert report.metrics["clip/low_share"] + report.metrics["clip/high_share"] > 0, "the ratio to the start of the step has moved"
    assert report.version == 1 and report.num_tokens == single.num_tokens, "a token counts once, however often it is trained"
    assert not torch.allclose(weights(model), weights(once))


def test_epochs_are_three_updates_of_adam_whose_first_is_that_of_a_single_one() -> None:
    model, once = tiny_model(), tiny_model()
    several, single = trainer(model, epochs_per_step=3), trainer(once)
    several.step(batch())
    single.step(batch())
    counts = [int(ours.optimizer.state_dict()["state"][0]["step"]) for ours in (several, single)]
    assert counts == [3, 1]


def test_the_second_moment_decays_by_the_beta_that_is_asked_for() -> None:
    model = tiny_model()
    ours = trainer(model, betas=(0.9, 0.999))
    ours.step(batch())
    parameter = next(p for name, p in model.named_parameters() if name.endswith("down_proj.weight"))
    state = ours.optimizer.state[parameter]
    # exp_avg is 0.1 of the gradient and exp_avg_sq 0.001 of its square: 0.1^2 / 0.001 = 10.
    assert torch.allclose(state["exp_avg"] ** 2, 10 * state["exp_avg_sq"], rtol=1e-6, atol=0)


def test_a_batch_whose_advantages_are_all_0_leaves_weights_and_moments_and_is_no_skip() -> None:
    model = tiny_model()
    ours = trainer(model, weight_decay=0.5, learning_rate=0.1)
    ours.step(batch())  # It leaves momentum.
    before, moments = weights(model), ours.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    data = batch(version=1)
    data.rewards[:] = 0.1
    report = ours.step(data)
    assert torch.equal(weights(model), before)
    assert torch.equal(ours.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert (report.version, report.skipped, report.metrics["grad_norm"]) == (2, None, 0.0)
    assert report.metrics["tokens/zero_advantage_share"] == 1.0 and report.num_tokens > 0


def test_a_reward_below_0_is_refused_where_its_mean_divides() -> None:
    data = batch()
    data.rewards[3] = -0.5
    with pytest.raises(RunFailed, match=r"has a reward of -0\.5, and objective\.advantage = \"maxrl\" divides by the mean"):
        trainer(tiny_model(), scoring=Scoring(advantage="maxrl")).step(data)


def test_weights_are_decayed_but_norms_are_not() -> None:
    model = tiny_model()
    norms = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 1}
    matrices = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 2}
    ours = trainer(model, weight_decay=0.5)
    clear_gradients(model)
    next(model.parameters()).grad.view(-1)[0] = 1e-30  # A gradient of 0 would be no step; this one moves nothing by itself.
    clipped_step(ours.optimizer, learning_rate=0.1, max_norm=1.0)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in norms.items())
    assert all(torch.allclose(now[n], p * 0.95) for n, p in matrices.items())


def test_the_learning_rate_follows_the_schedule() -> None:
    ours = trainer(tiny_model(), schedule=Schedule("linear", warmup_steps=2, total_steps=4), learning_rate=1.0e-3)
    rates = [ours.step(batch(version=v)).metrics["step/learning_rate"] for v in range(4)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_a_gradient_is_scaled_down_to_its_largest_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr("midflight.trainer.trainer.adamw", lambda model, **options: torch.optim.SGD(model.parameters(), lr=1.0))
    ours = trainer(model, max_grad_norm=1e-3, learning_rate=1.0)
    before = weights(model)
    report = ours.step(batch())
    assert report.metrics["grad_norm"] > 1e-3
    assert float((weights(model) - before).norm()) == pytest.approx(1e-3, rel=1e-2)


def test_ages_and_ratios_are_reported() -> None:
    data = batch(version=3)
    data.versions[trained_positions(data)[:5]] = 1
    metrics = trainer(tiny_model(), version=3).step(data).metrics
    assert metrics["age/2/share"] == pytest.approx(5 / data.loss_mask.sum())
    assert metrics["age/max"] == 2
    assert 0 < metrics["rho/ess"] <= 1


def test_a_configuration_becomes_a_trainer() -> None:
    config = load_config(
        None, ["objective.kind=gspo", "correction.weight=tis_sequence", "trainer.updates_per_step=2", "environment.max_tokens=24"]
    )
    ours = trainer_of(config, tiny_model(torch.float32))
    assert ours.objective.loss.formula.function == "gspo" and ours.objective.loss.weight == "tis_sequence"
    assert ours.step(batch()).version == 1


def test_a_teacher_makes_an_advantage_of_each_token() -> None:
    data = batch()
    teacher = data.logprobs + np.where(np.arange(len(data.logprobs)) % 2, 0.5, -0.5).astype(np.float32)
    scoring = Scoring(teacher_weight=2.0, counts_rewards=False)
    step = step_tokens(
        replace(data, teacher_logprobs=teacher),
        scoring,
        max_staleness=0,
        max_missing_share=0.1,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    assert step.advantage.tolist() == pytest.approx([1.0 if position % 2 else -1.0 for position in trained_positions(data)], abs=1e-5)
    with pytest.raises(RunFailed, match="no log-probabilities of a teacher"):
        trainer(tiny_model(), scoring=scoring).step(data)


def test_distillation_brings_the_student_to_the_teacher() -> None:
    """Tokens are drawn from the student after one prompt; the divergence there, over all of the vocabulary, falls."""
    student, teacher = tiny_model(), tiny_model(seed=7)
    prompt = torch.tensor([[5, 6, 7]])
    ours = trainer(student, scoring=Scoring(teacher_weight=1.0, counts_rewards=False), learning_rate=1e-2)
    attend_raggedly(teacher)

    def next_token(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad(), packed_runs(Runs.of_one(3)):
            return model(prompt, position_ids=torch.arange(3)[None]).logits[0, -1].log_softmax(-1)

    def divergence() -> float:
        p, q = next_token(student), next_token(teacher)
        return float((p.exp() * (p - q)).sum())

    before = divergence()
    torch.manual_seed(0)
    for version in range(20):
        p, q = next_token(student), next_token(teacher)
        drawn = torch.multinomial(p.exp(), 128, replacement=True)
        ours.step(answers(prompt[0], drawn, version=version, logprobs=p[drawn], teacher=q[drawn]))
    assert divergence() < 0.5 * before


def answers(prompt: torch.Tensor, drawn: torch.Tensor, *, version: int, logprobs: torch.Tensor, teacher: torch.Tensor) -> PackedBatch:
    """Each drawn token behind the prompt, a row and a rollout of its own, in one group."""
    count, width = len(drawn), len(prompt) + 1
    rows = torch.cat([prompt.expand(count, -1), drawn[:, None]], 1).numpy().astype(np.int32)

    def last(values: torch.Tensor) -> np.ndarray:
        table = np.zeros((count, width), np.float32)
        table[:, -1] = values.numpy()
        return table.ravel()

    return PackedBatch(
        lease=version,
        train_version=version,
        token_ids=rows.ravel(),
        loss_mask=last(torch.ones(count)).astype(np.bool_),
        logprobs=last(logprobs),
        versions=np.full(rows.size, version, np.int32),
        kv_versions=np.full(rows.size, version, np.int32),
        row_offsets=np.arange(0, rows.size + 1, width, dtype=np.int32),
        row_rollout=np.arange(count, dtype=np.int32),
        rewards=np.zeros(count, np.float32),
        rollout_group=np.zeros(count, np.int32),
        truncated=np.zeros(count, np.bool_),
        teacher_logprobs=last(teacher),
    )
