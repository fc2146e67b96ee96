"""The meaning of every number of a run, in the one place that defines it. `python -m
midflight.observe.reference docs/metrics.md` makes the page from it.
"""

import re
from typing import NamedTuple


class Meaning(NamedTuple):
    """A number by its name for dashboards. In the name, `<...>` stands for a name that the run
    itself chose.
    """

    name: str
    formula: str
    unit: str = ""
    healthy: str = ""
    """Its value in a run that learns, in a few words; empty where it depends on the task."""


_SHARE = "share, 0 to 1"
_TOKENS = "tokens"
_SECONDS = "s"
_RATE = "tokens/s"

MEANINGS = (
    Meaning("train/loss", "mean of the loss over the updates made"),
    Meaning(
        "train/grad_norm",
        "mean L2 norm of the gradient over the updates made, before clipping",
        "",
        "finite and steady; jumps of ten times are a bad sign",
    ),
    Meaning("train/reward/mean", "mean reward of the batch", "reward", "rises"),
    Meaning(
        "train/reward/<name>",
        "mean of a component of the reward, over the rollouts of the batch that it applies to",
        "reward",
    ),
    Meaning(
        "train/rho/mean",
        "mean of ρ = π_prox / µ, the policy that begins the step over the one that sampled",
        "ratio",
        "0.5 to 2 (alarm outside); near 1",
    ),
    Meaning("train/rho/min", "smallest ρ", "ratio"),
    Meaning("train/rho/max", "largest ρ", "ratio"),
    Meaning("train/rho/std", "standard deviation of ρ", "ratio", "up to 1 (alarm above)"),
    Meaning(
        "train/rho/ess",
        (
            "(Σw)² / (n Σw²) of the weights used; of ρ itself under a bypass objective. Masks and "
            "the age weight are not in it"
        ),
        _SHARE,
        "0.3 and more (alarm below); near 1",
    ),
    Meaning(
        "train/rho/k1",
        "mean of -log ρ: KL divergence of behaviour and proximal policy",
        "nats",
        "-0.1 to 0.1 (alarm outside)",
    ),
    Meaning("train/rho/k3", "mean of ρ - 1 - log ρ: the same, never negative", "nats", "below 0.1"),
    Meaning("train/rho/chi2_token", "mean of ρ² - 1", "", "below 1"),
    Meaning("train/rho/chi2_sequence", "the same of the product of ρ over a rollout"),
    Meaning(
        "train/clip/low_share",
        (
            "tokens whose gradient the lower clip took away; of dppo_tv and ipo, those outside the "
            "trust region"
        ),
        _SHARE,
        "below 0.1",
    ),
    Meaning(
        "train/clip/high_share",
        "tokens whose gradient the upper clip took away; dual_clip counts as upper",
        _SHARE,
        "below 0.1",
    ),
    Meaning(
        "train/masked/<mask>",
        (
            "tokens that a mask of [correction] took out: geometric, product, k3, veto, m2po, "
            "opsm; one token may be under several"
        ),
        _SHARE,
        "below 0.1",
    ),
    Meaning(
        "train/masked/not_finite",
        "trainable tokens of the batch without a log-probability that can be one",
        _SHARE,
        "0",
    ),
    Meaning(
        "train/masked/no_reward", "trainable tokens of rollouts without a reward", _SHARE, "near 0"
    ),
    Meaning(
        "train/masked/truncated",
        "trainable tokens of rollouts cut short, with objective.mask_truncated",
        _SHARE,
    ),
    Meaning(
        "train/age/mean",
        "mean age of the tokens in the loss",
        "versions",
        "at most rollout.max_staleness",
    ),
    Meaning("train/age/max", "largest age", "versions", "at most rollout.max_staleness"),
    Meaning("train/age/<n>/share", "tokens of age n", _SHARE),
    Meaning(
        "train/age/<n>/<reading>",
        (
            "rho_mean, rho_min, rho_max, rho_std, ess, k1, k3, chi2_token, chi2_sequence, "
            "clip_low_share, clip_high_share or masked_<mask> of the tokens of age n"
        ),
        "",
        "as of all ages; worse with age",
    ),
    Meaning(
        "train/mismatch/mean",
        (
            "mean of |log ρ| over tokens of age 0, where ρ would be 1 if engine and trainer "
            "computed alike"
        ),
        "nats",
        "1e-6 in float32, 1e-2 in bfloat16",
    ),
    Meaning("train/mismatch/max", "largest of them", "nats"),
    Meaning("train/mismatch/k3", "mean of ρ - 1 - log ρ over those tokens", "nats", "below 1e-3"),
    Meaning("train/mismatch/share", "tokens of age 0", _SHARE),
    Meaning(
        "train/mismatch/same_keys/<reading>",
        (
            "mean, max, k3, share of those that attended to keys of their own version only: "
            "rounding and kernels"
        ),
        "nats",
        "as train/mismatch/mean",
    ),
    Meaning(
        "train/mismatch/older_keys/<reading>",
        (
            "the same of those that attended to older keys (kv_version): what the pause mode keep "
            "costs"
        ),
        "nats",
    ),
    Meaning(
        "train/critic/loss",
        "mean loss of the critic over its updates, with objective.advantage = gae",
        "",
        "falls",
    ),
    Meaning(
        "train/critic/grad_norm",
        "mean L2 norm of the critic's gradient, before clipping",
        "",
        "finite and steady",
    ),
    Meaning(
        "train/critic/explained_variance",
        (
            "1 - var(return - value) / var(return), of the critic that began the step; absent "
            "where returns are all alike"
        ),
        "",
        "rises towards 1; below 0 it misleads",
    ),
    Meaning("train/critic/value_mean", "mean value over the tokens", "reward"),
    Meaning(
        "train/entropy/estimate",
        "mean of -log π of the sampled tokens",
        "nats",
        "falls slowly; near 0 nothing is explored any more",
    ),
    Meaning("train/tokens/trained", "tokens in the loss", _TOKENS, "near train/tokens"),
    Meaning(
        "train/tokens/zero_advantage_share",
        "of them, those whose advantage is 0",
        _SHARE,
        "below 0.5",
    ),
    Meaning("train/step/learning_rate", "learning rate of the step"),
    Meaning(
        "train/step/micro_batches",
        "micro-batches of the training forward, on the first rank",
        "count",
    ),
    Meaning(
        "train/step/early_share",
        "tokens of groups that were worked on before their batch was whole",
        _SHARE,
    ),
    Meaning(
        "train/step/updates_skipped",
        "updates not made: loss or gradient not finite, or held back by an alarm",
        "count",
        "0",
    ),
    Meaning("train/step/alarms", "readings out of their bounds", "count", "0"),
    Meaning(
        "train/rows/oversized",
        "rows longer than trainer.micro_batch_tokens, which go alone",
        "count",
        "0",
    ),
    Meaning(
        "train/experts/recorded_share",
        (
            "input tokens of a mixture with a record of the experts that the engine sent them to, "
            "which the trainer repeats"
        ),
        _SHARE,
        "1",
    ),
    Meaning("train/step_seconds", "length of the step, without the wait for its batch", _SECONDS),
    Meaning("train/tokens", "trainable tokens of the batch", _TOKENS),
    Meaning("train/groups", "groups of the batch", "count", "rollout.groups_per_step"),
    Meaning(
        "train/length_mean",
        "mean trainable tokens of a rollout in the batch",
        _TOKENS,
        "near rollout/length_mean",
    ),
    Meaning(
        "train/staleness_mean",
        "mean age of the trainable tokens of the batch",
        "versions",
        "at most rollout.max_staleness",
    ),
    Meaning(
        "train/staleness_max", "largest age of them", "versions", "at most rollout.max_staleness"
    ),
    Meaning("train/tokens_per_second", "trained tokens over the last 15 s", _RATE),
    Meaning(
        "train/stage_seconds",
        "of the slowest engine since the step before: bringing new weights in while it decodes",
        _SECONDS,
        "less than a step",
    ),
    Meaning(
        "train/pause_seconds",
        "of the slowest engine: standing still for the swap",
        _SECONDS,
        "a hundredth of a step",
    ),
    Meaning(
        "rollout/reward_mean",
        "mean reward of the rollouts that ended since the step before and have one",
        "reward",
        "rises",
    ),
    Meaning(
        "rollout/reward/<name>",
        "mean of a component of the reward over the rollouts that have it",
        "reward",
    ),
    Meaning(
        "rollout/reward_spread",
        "mean standard deviation of the rewards within a group, over n - 1",
        "reward",
        "above 0: without it nothing is learned",
    ),
    Meaning(
        "rollout/zero_spread_share",
        "groups whose rewards are all alike",
        _SHARE,
        "below 0.5; else easier or harder tasks",
    ),
    Meaning(
        "rollout/num_rollouts",
        "rollouts that ended since the step before, those without reward too",
        "count",
    ),
    Meaning(
        "rollout/num_failed", "tries that got no reward since the step before", "count", "near 0"
    ),
    Meaning(
        "rollout/num_groups_dropped",
        "groups dropped since the step before",
        "count",
        "0, but with rollout.drop_zero_spread",
    ),
    Meaning(
        "curriculum/refilled/<which>",
        (
            "groups since the step before whose rewards were all alike, and whose places others "
            "took: of rollouts that all passed or all failed"
        ),
        "count",
        "few; else another [curriculum]",
    ),
    Meaning(
        "curriculum/drawn/<pool>",
        (
            "tasks begun since the step before, from the pool that they were in: unseen, hard, "
            "learnable, easy"
        ),
        "count",
        "mostly unseen and learnable",
    ),
    Meaning("curriculum/pool/<pool>", "tasks in the pool", "count", "easy grows"),
    Meaning(
        "curriculum/pass_rate",
        "passes among the rollouts that pass rates look back on",
        _SHARE,
        "near 0.5 where tasks are drawn by learnability",
    ),
    Meaning("rollout/length_mean", "mean output tokens of the rollouts with a reward", _TOKENS),
    Meaning(
        "rollout/length_<which>",
        (
            "min and max of them; terminated_mean, terminated_min and terminated_max of those not "
            "cut short"
        ),
        _TOKENS,
    ),
    Meaning(
        "rollout/clipped_ratio",
        "rollouts of which some turn ended by its limit",
        _SHARE,
        "below 0.1; else raise environment.max_tokens",
    ),
    Meaning("rollout/turns_mean", "mean answers of the model in a rollout with a reward", "count"),
    Meaning("rollout/tokens_per_second", "output tokens of all engines over the last 15 s", _RATE),
    Meaning(
        "rollout/<measured>",
        (
            "mean of what environments measured, over the rollouts that have it; numbers among "
            "fields are fields/NAME"
        ),
    ),
    Meaning(
        "rollout/samples",
        (
            "a table in trackers: source, task, reward, prompt and completion of some rollouts, "
            "with rollout.show_every"
        ),
    ),
    Meaning("alarms", "a table in trackers: name and text of each alarm, as in the journal"),
    Meaning("rollout/reward_histogram", "histogram in trackers: rewards since the step before"),
    Meaning(
        "rollout/generated_length_histogram",
        "histogram: output tokens of the rollouts with a reward",
        _TOKENS,
    ),
    Meaning(
        "rollout/truncated_length_histogram", "histogram: the same of those cut short", _TOKENS
    ),
    Meaning(
        "train/trained_length_histogram",
        "histogram: trainable tokens of the rollouts of the batch",
        _TOKENS,
    ),
    Meaning(
        "train/staleness_histogram", "histogram: trainable tokens of the batch by age", "versions"
    ),
    Meaning("tools/call_frequency", "mean calls of a rollout", "count"),
    Meaning("tools/failure_frequency", "failed calls over calls", _SHARE, "below 0.1"),
    Meaning(
        "tools/seconds", "mean seconds of a call", _SECONDS, "well below environment.tool_seconds"
    ),
    Meaning("tools/<name>/<reading>", "call_frequency, failure_frequency and seconds of one tool"),
    Meaning("tools/unknown", "mean calls of a rollout to tools that there are not", "count", "0"),
    Meaning(
        "tools/exhausted",
        "rollouts that environment.max_turns ended while tools were called",
        _SHARE,
        "below 0.1",
    ),
    Meaning(
        "eval/<source>/reward",
        "mean reward of the held-out tasks that were scored; absent where none was",
        "reward",
        "rises",
    ),
    Meaning("eval/<source>/num_tasks", "held-out tasks that were scored", "count"),
    Meaning(
        "eval/<source>/num_failed",
        "held-out tasks without a score, which are in no mean",
        "count",
        "at most 5 % of the tasks",
    ),
)
"""A name without a placeholder comes before the family that would match it too."""


def meaning_of(name: str) -> Meaning | None:
    """The meaning of a name that a run gave; None where it is not ours."""
    return next((meaning for meaning, pattern in _PATTERNS if pattern.fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    """The last placeholder of a name may stand for blanks and slashes, earlier ones may not."""
    parts = [re.escape(part) for part in re.split(r"<\w+>", name)]
    if len(parts) == 1:
        return re.compile(parts[0])
    return re.compile("[^/]+".join(parts[:-1]) + ".+" + parts[-1])


_PATTERNS = [
    (meaning, _pattern(meaning.name))
    for meaning in sorted(MEANINGS, key=lambda meaning: "<" in meaning.name)
]

STEP_KEYS = (
    (
        "`step`, `version`, `seconds`",
        (
            "Number of the step, from 1; the version it made; when, in seconds that the run has "
            "run for, over all its starts."
        ),
    ),
    (
        "`step_seconds`, `groups`, `tokens`",
        (
            "Length of the step, without the wait for its batch; groups of the batch, and their "
            "trainable tokens. Those in the loss are `tokens/trained`."
        ),
    ),
    ("`rollouts`", "Training rollouts that ended since the line before, those without reward too."),
    (
        "`reward`, `reward_by_source`",
        "Mean reward of those that have one, in all and for each source of tasks.",
    ),
    (
        "`reward_spread`, `zero_spread_share`",
        (
            "Mean standard deviation of the rewards within a group, and the share of groups whose "
            "rewards are all alike, of the groups that ended since the line before."
        ),
    ),
    (
        "`components`, `metrics`",
        (
            "Means of what rewards are made of, and of what environments measured "
            "([Result](environments.md#what-an-environment-returns)), each over the rollouts that "
            "have it; numbers among `fields` are metrics `fields/NAME`."
        ),
    ),
    (
        "`curriculum`",
        (
            "With `[curriculum]`: `drawn/POOL`, tasks begun since the line before from each pool "
            "(`unseen`, `hard`, `learnable`, `easy`); `pool/POOL`, how many tasks it has; "
            "`pass_rate`, passes among the rollouts that pass rates look back on. With "
            "`rollout.drop_zero_spread`: `refilled/passed` and `refilled/failed`, groups that "
            "others replaced because all of their rollouts passed, or none."
        ),
    ),
    (
        "`turns_mean`",
        "Mean answers of the model in the rollouts that got a reward since the line before.",
    ),
    (
        "`generated_length`, `truncated_share`",
        (
            "Mean output tokens of the rollouts that got a reward since the line before, and the "
            "share "
            "of them of which some turn ended by its limit."
        ),
    ),
    (
        "`lengths`",
        (
            "`min` and `max` of the same; `terminated_mean`, `terminated_min` and "
            "`terminated_max` of the rollouts that were not cut short."
        ),
    ),
    (
        "`histograms`",
        (
            "`reward`, `generated_length`, `truncated_length` of the rollouts that ended since the "
            "line before, `trained_length` of the batch: `edges`, and `counts` between them."
        ),
    ),
    (
        "`trained_length`",
        (
            "Mean trainable tokens of a rollout in the batch: less than the former where long "
            "answers are dropped or masked."
        ),
    ),
    (
        "`failures`",
        "Tries of rollouts that got no reward since the line before, by class of error.",
    ),
    ("`staleness`", "Trainable tokens of the batch by age in versions."),
    ("`staleness_mean`, `staleness_max`", "Mean and largest of those ages."),
    (
        "`generation_rate`, `training_rate`",
        (
            "Output tokens per second of all engines, and trained tokens per second, over the "
            "last 15 s."
        ),
    ),
    ("`overlap_share`", "As in the summary, so far."),
    (
        "`waits`, `dropped`",
        (
            'Since the line before: seconds of idleness, by `"who for whom"`; groups dropped, by '
            "reason."
        ),
    ),
    (
        "`stage_seconds`, `pause_seconds`",
        (
            "Of the slowest engine that took new weights since the line before: time to bring "
            "them in while it decoded, and time it stood still for the swap."
        ),
    ),
    (
        "`trainer`, `totals`",
        (
            "What the trainer measured in the step, by its own names (below); counts since the run "
            "began, by those of the summary."
        ),
    ),
)
"""The keys of a line of kind `step`."""

EVALUATION_KEYS = (
    (
        "`version`, `source`, `step`, `seconds`",
        "The version that answered, as the engines attest it; the source of tasks; when.",
    ),
    (
        "`num_tasks`, `mean_reward`",
        (
            "Held-out tasks that were scored, and the mean of their rewards; exact match for the "
            "tasks "
            "of the demo. Null if none was scored."
        ),
    ),
    (
        "`num_failed`, `error`",
        (
            "Tasks without a score, which count in no mean, and why one of them has none: its "
            "environment or engine failed, a token of another version answered it, or the "
            "evaluation was over before it."
        ),
    ),
    (
        "`incomplete`",
        "More than 5 % of the tasks have no score: do not compare the mean with others.",
    ),
    (
        "`at`",
        (
            "Of a suite (`source` is then `SUITE/SOURCE`, and `num_tasks` counts answers): its "
            "`samples` and `temperature`; `pass@k`, the chance that one of k answers passes, and "
            "`best@k`, the mean reward of the best of k, both without bias, over the tasks with k "
            "answers that were scored."
        ),
    ),
)
"""The keys of a line of kind `evaluation`."""

ALARMS = (
    (
        "`failure`",
        (
            "A rollout got no reward, the first by this class of error; with the lines of your own "
            "code. The whole traceback is in `logs/rollout.log`."
        ),
    ),
    ("`failures`", "A tenth of the last 64 tries, and 8 at least, got no reward."),
    (
        "`no_model_call`",
        (
            "A rollout was scored though no answer of the model went into it. Eight groups of such "
            "rollouts in a row end the run."
        ),
    ),
    (
        "`rewards_equal`",
        (
            "The rewards of three steps' worth of rollouts in a row are all alike (not in a run "
            "with a teacher)."
        ),
    ),
    (
        "`groups_alike`",
        (
            "Of the last 16 groups, or of two steps' worth where that is more, three quarters had "
            "one reward for all their answers; whether they are too hard or too easy, and what "
            "changes that. Not where a critic or a teacher judges."
        ),
    ),
    (
        "`answers_cut`",
        (
            "A quarter of the last 64 rollouts, once there are 32, were cut short by a limit; "
            "which one, and what the others took."
        ),
    ),
    (
        "`step_size`",
        (
            "One of the first ten steps is more than 0.25 nats from what sampled its batch "
            "(`rho/k1`, `rho/k3`); the learning rate, and one to begin again with. It is said in "
            "place of `off_policy`."
        ),
    ),
    ("`evaluation_incomplete`", "An evaluation is `incomplete`."),
    (
        "`group_dropped`",
        (
            "A group is lost to training, the first for each reason: not one or too few of its "
            "rollouts could be scored, its tokens were too old, its loss was not finite, or its "
            "step was not made."
        ),
    ),
    (
        "`off_policy`",
        (
            "A reading of the trainer is [out of its bounds](#alarms): the batch is far from what "
            "its policy would say."
        ),
    ),
    (
        "`trainer`, `worker`",
        (
            "At its start the trainer went back to an older checkpoint, or trains in padded rows; "
            "agents that block their worker run alone in it from now on."
        ),
    ),
    (
        "`unclaimed`",
        "Nobody has claimed a rollout for `run.stall_seconds` though some wait for [workers "
        "outside](sessions.md#claims), and none that was claimed is under way; again each time "
        "that this has doubled.",
    ),
    (
        "`engine_lost`, `engine_back`",
        "An engine, or the server that it speaks for, does not serve requests, or does again.",
    ),
)
"""The alarms, and when each is raised."""

SUMMARY_KEYS = (
    (
        "`name`, `primary`",
        "`run.name`; the first source of the configuration, whose held-out scores stand alone.",
    ),
    (
        "`heldout_before`, `heldout_after`",
        (
            "Its mean reward on held-out tasks, sampled at the policy's temperature, before "
            "reinforcement learning (after the warm start), and with the last version."
        ),
    ),
    (
        "`seconds`, `start_seconds`, `peak_memory_mb`",
        (
            "That the run has run for over all its starts, and in this one: warm start, "
            "evaluations and export included. Largest sum of the proportional set sizes of all "
            "processes of the run, sampled every so often. Pages that processes share count once."
        ),
    ),
    ("`steps`, `version`", "Steps of reinforcement learning, and the last version."),
    (
        "`weight_updates`",
        (
            "Versions that went live on at least one engine; the one that engines started with is "
            "none."
        ),
    ),
    (
        "`rollouts`, `failed_rollouts`, `rollouts_spanning_versions`",
        (
            "Training rollouts that ended, those of them without reward, and those whose tokens "
            "were sampled under more than one version."
        ),
    ),
    ("`failed_requests`", "Requests that ended in an error, counted where the agent sees it."),
    (
        "`generated_tokens`, `trained_tokens`",
        (
            "Output tokens of the engines, evaluations included; tokens the loss was taken over, "
            "without the warm start."
        ),
    ),
    ("`max_token_staleness`", "Largest staleness of a trained token."),
    (
        "`overlap_share`, `engine_busy`, `trainer_busy`",
        (
            "Time in which some engine and the trainer computed at once, some engine did, the "
            "trainer did, divided by the time of the training phase."
        ),
    ),
    (
        "`slots_used`",
        (
            "Mean number of requests that decoded, divided by how many could: "
            "`engine.max_running` of all engines, or the rollouts that may run where those are "
            "fewer. Null before the first step."
        ),
    ),
    (
        "`bound`, `advice`",
        (
            "`generation-bound` where the trainer was idle more than the engines (by a tenth of "
            "the time or more), `trainer-bound` where it was the other way, else `balanced`; and "
            "which option to turn. Beside a trainer that waited for less than a quarter of the "
            "time, engines are idle by the slots that were free; beside one that waited more, by "
            "the time in which none computed. More engines or threads are not advised where "
            "engines and trainer have a thread for every core."
        ),
    ),
    (
        "`loss`, `notes`",
        "The loss with every default filled in, and what may surprise, as said at the start.",
    ),
    ("`turns_mean`", "Mean answers of the model in the last 256 training rollouts with a reward."),
    (
        "`failures`, `learning`",
        (
            "Tries of rollouts without a reward, by class of error, since the last restart; "
            "`reward_spread` and the like, as in the journal, of the last 256 training rollouts "
            "and groups."
        ),
    ),
    (
        "`sources`",
        (
            "For each source `heldout_before`, `heldout_after`, `num_heldout` (tasks scored in the "
            "last evaluation), `failed_before` and `failed_after` (tasks without a score), "
            "`incomplete`, and `reward`, the mean of its last 256 training rollouts."
        ),
    ),
    (
        "`waits`, `dropped`",
        (
            'Seconds of idleness in the training phase of this start, by `"who for whom"`; groups '
            "dropped, by reason, of the whole run."
        ),
    ),
    (
        "`accounts`",
        (
            "Where all groups are: submitted = running + waiting + leased + trained + dropped. And "
            "all "
            "tokens of rollouts that have ended: received = waiting + trained + masked + dropped. "
            "Of the whole run, from its store."
        ),
    ),
)
"""The keys of `summary.json`."""

METRICS = (
    (
        (
            "`midflight_turns`, `midflight_prompt_tokens`, `midflight_turn_output_tokens`, "
            "`midflight_turn_seconds`"
        ),
        "",
        "Answers given to agents, and the prompt tokens of them; histograms over those answers.",
    ),
    (
        "`midflight_resumes`, `midflight_turns_spanning_versions`",
        "",
        (
            "Generations that were interrupted and resumed; answers whose tokens come from several "
            "versions."
        ),
    ),
    (
        "`midflight_sessions_closed`, `midflight_branches`",
        "",
        (
            "Sessions that ended, and their turns that did not go on from the newest end of what "
            "came before: sub-agents, compacted contexts, retries."
        ),
    ),
    (
        "`midflight_rewritten_histories`",
        "",
        (
            "Chats whose recorded history came back otherwise (stripped thinking, changed tools) "
            "and so started a branch. Many of them mean that the agent's prefix is prefilled and "
            "trained as context again and again."
        ),
    ),
    (
        "`midflight_retokenisation_mismatches`",
        "",
        (
            "Prompts whose text, tokenised anew, would have had other ids than those sampled, "
            "which are reused."
        ),
    ),
    (
        "`midflight_ignored_fields`",
        "`path`, `field`",
        "Requests with a field that has no effect; names in no table are `other`.",
    ),
    (
        "`midflight_failed_requests`",
        "`status`",
        "Requests that ended in an error, at the agent's edge.",
    ),
    (
        "`midflight_engine_tokens`, `midflight_engine_running`, `midflight_engine_step_seconds`",
        "`engine`",
        "Output tokens; requests that decode together; length of a step.",
    ),
    (
        "`midflight_max_in_flight`",
        "`kind`, `reason`",
        (
            "Rollouts of training, and of an evaluation, that may run at once; and why not more: "
            "the option is `set`, the engines' `slots` or room for `keys`, or the bound on "
            "`staleness`."
        ),
    ),
    (
        "`midflight_engine_requests`",
        "`engine`",
        "Requests that an engine has; those beyond `midflight_engine_running` wait inside it.",
    ),
    (
        "`midflight_engine_version`, `midflight_engine_quarantined`, `midflight_quarantines`",
        "`engine`",
        "The version it serves; 1 while it is in quarantine; how often it was put there.",
    ),
    ("`midflight_handovers`", "`engine`", "Versions that an engine took."),
    (
        "`midflight_engines`, `midflight_engines_joined`, `midflight_engines_left`",
        "`state`",
        (
            "A gauge of the engines, and those that came or went while the run went on; a moved "
            "one does both."
        ),
    ),
    (
        "`midflight_stage_seconds`, `midflight_commit_pause_seconds`",
        "",
        "Histograms of handovers: bringing a version into an engine, and its pause for the swap.",
    ),
    (
        "`midflight_version`, `midflight_checkpoint_version`",
        "",
        "The newest version, and that of the newest checkpoint of this start.",
    ),
    (
        "`midflight_step_seconds`, `midflight_skipped_steps`",
        "",
        "Steps of the trainer, and those that left the weights as they were.",
    ),
    (
        "`midflight_trained_tokens`, `midflight_trained_tokens_by_age`",
        "`age`",
        "Tokens the loss was taken over, in all and by age.",
    ),
    (
        "`midflight_rollouts`, `midflight_reward_sum`",
        "`source`, `scored`",
        "Rollouts that ended, and a gauge of the sum of their rewards; divide it by those scored.",
    ),
    ("`midflight_rollout_seconds`", "`source`", "How long rollouts took."),
    (
        "`midflight_heldout_reward`, `midflight_heldout_failed`",
        "`source`",
        "Of the last evaluation: mean reward, and tasks without a score.",
    ),
    (
        "`midflight_failed_rollouts`, `midflight_alarms`",
        "`error`; `name`",
        "Tries of rollouts without a reward, by class of error; alarms.",
    ),
    (
        (
            "`midflight_generated_length`, `midflight_trained_length`, "
            "`midflight_truncated_share`, `midflight_reward_spread`, "
            "`midflight_zero_spread_share`, `midflight_turns_mean`"
        ),
        "",
        "Gauges, as in the journal, of the last 256 training rollouts and groups.",
    ),
    (
        "`midflight_reward_component`, `midflight_environment_metric`",
        "`name`",
        "Gauges, as `components` and `metrics` in the journal, of the same rollouts.",
    ),
    (
        "`midflight_drawn_tasks`, `midflight_pool_tasks`, `midflight_refilled_groups`",
        "`pool`; `pool`; `alike`",
        (
            "Tasks that a curriculum chose, by the pool that they were in; a gauge of how many "
            "tasks a pool has; groups whose rewards were all alike, because all their rollouts "
            "`passed` or `failed`, and which others replaced."
        ),
    ),
    (
        "`midflight_dropped_groups`, `midflight_groups`, `midflight_tokens`",
        "`reason`; `state`; `fate`, `reason`",
        (
            "Groups dropped. Gauges: where all groups of the run are (`waiting` is the queue), and "
            "what became of all tokens of rollouts that have ended, whatever was resumed."
        ),
    ),
    ("`midflight_waited_seconds`", "`who`, `for_whom`", "Idle time."),
    (
        "`midflight_process_bytes`",
        "`process`, `pid`",
        "Resident memory of the run's processes; pages that they share count in each.",
    ),
)
"""The metrics of `/metrics`: names, labels and meanings."""
