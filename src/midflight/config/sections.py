"""One frozen section for each station. Every option has a type, a bound, a unit and a sentence that
says what larger means.

Nothing here imports torch. Code receives the numbers that it needs, not these objects.
"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue

from midflight.config.agents import McpSection, RewardSection, SandboxSection, UntrackedSection
from midflight.config.cluster import ClusterSection
from midflight.config.devices import ServerSection
from midflight.config.loss import (
    CorrectionSection,
    CriticSection,
    DistillationSection,
    ObjectiveSection,
)
from midflight.config.section import (
    Above0,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Seconds,
    Section,
)
from midflight.config.sources import CurriculumSection, SourceSection
from midflight.types import PauseMode, SamplingParams, StalePolicy


class RunSection(Section):
    name: str = "run"
    """Label of the run; part of every request seed, so two runs of the same name and seed sample
    alike.
    """
    folder: Path = Path("runs/run")
    """The folder for everything that the run writes."""
    store_folder: Path | None = None
    """Folder on a disk of the gateway's machine for the store, of which each checkpoint then gets a
    copy; an absolute path. Default: the run's folder, which may not lie on a network then.
    """
    seed: Count = 0
    """Seeds weights, task order and sampling."""
    steps: Positive = 100
    """Optimiser steps of reinforcement learning; larger trains longer."""
    stop_at_reward: Fraction | None = None
    """Ends before `steps` once the mean reward over the last 20 steps reaches this; larger trains
    longer.
    """
    restarts: Count = 2
    """How often each part may die and be started again without having worked in between, before the
    run fails. A restart also counts no more after ten minutes, and an engine that is killed while
    it starts does not count. Larger tolerates more crashes.
    """
    stall_seconds: Above0 = 120.0
    """A part that hangs is shown and started again after this, unless its task has a longer limit.
    A trial before the run that does nothing for so long is ended. Larger bears longer standstills.
    """
    stop_seconds: Seconds = 5.0
    """Time a stopping run gives its parts before it kills them; larger waits longer for writes."""


class ModelSection(Section):
    path: Path | None = None
    """A Hugging Face model folder to start from, or a GGUF file, which is converted into one beside
    it. Without it a model is made from the sizes below, with random weights.
    """
    name: str = "policy"
    """The model id that agents use."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of weights in the trainer, and in engines unless `engine.dtype` says otherwise;
    larger is exacter and slower.
    """
    hidden_size: Positive = 128
    """Width of a made model; larger learns more and runs slower."""
    intermediate_size: Positive = 384
    """Width of its feed-forward layers."""
    num_layers: Positive = 4
    """Its depth."""
    num_heads: Positive = 4
    """Its attention heads; must divide `hidden_size`."""
    num_kv_heads: Positive = 2
    """Its key/value heads; must divide `num_heads`."""
    max_context: Positive = 256
    """Longest prompt plus answer, in tokens; larger costs memory in every engine slot. Default with
    `path`: the model's own limit (`max_position_embeddings`), as far as its keys and values, and
    the trainer's activations for a row, each fit into an eighth of the machine's memory (on GPUs
    into a quarter).
    """


class EngineSection(Section):
    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Which inference server generates: our own, or one of other people, in an environment of its
    own (`make engines`).
    """
    count: Positive = 1
    """Engine processes; larger generates more when there are cores for it. With `urls` or `servers`
    it is their number.
    """
    python: Path | None = None
    """Interpreter of the environment that the server is installed in. Default
    `.venv-vllm/bin/python` or `.venv-sglang/bin/python`.
    """
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, such as `http://127.0.0.1:30000`: they are attached,
    and none is started or stopped.
    """
    arguments: tuple[str, ...] = ()
    """Further words for the server's command line, after ours, such as
    `--gpu-memory-utilization=0.5`.
    """
    start_seconds: Seconds = 180.0
    """A server that starts is given up if it neither computes nor reads for so long. A server of
    `urls` is given up if it does not answer for so long. Larger waits longer for one that hangs.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision that engines serve in, and that weights travel in; `auto` is `model.dtype`. Smaller
    is faster, and further from the trainer.
    """
    max_running: Positive = 64
    """Requests decoded together; larger is faster per token and slower per request."""
    max_batch_tokens: Positive = 2048
    """Prompt and decode tokens of one engine step; larger prefills faster and makes steps
    longer.
    """
    threads: Positive = 1
    """CPU threads of one engine process; more than the free cores makes all slower."""
    device: str = "cpu"
    """The device that the engine computes on: `cpu`, `cuda`, which gives each engine GPUs of its
    own, or such as `cuda:1`.
    """
    share_devices: bool = False
    """Engines may be on GPUs that a trainer rank or another engine has, as on a machine with one;
    each then needs a part of its memory. Without this option that is refused.
    """
    lend: bool = False
    """One more embedded engine, in the place of the first trainer rank: it generates while that
    rank waits for a batch, and hands its requests to the others when the batch is there. This pays
    where training waits for generation and has cores or GPUs of its own.
    """
    servers: tuple[ServerSection, ...] = ()
    """The engines one by one, in place of `count`: the machine and the GPUs of each, and how many
    GPUs it is laid over.
    """
    deterministic: bool = False
    """An answer does not depend on other requests in the batch: vLLM's batch-invariant kernels,
    SGLang's deterministic inference with a seed for each request. It works on GPUs alone, and is
    slower.
    """
    guesses: Count = 0
    """The most tokens that the embedded engine guesses ahead from the text of a sequence, and
    computes in one step. It keeps those that it would have sampled, so that answers stay the same
    (speculative decoding by n-grams). Larger is faster where answers repeat earlier text and few
    requests run; where they do not, or many run, it costs time.
    """
    prefix_mb: Count = 256
    """Megabytes of keys and values that the embedded engine keeps of requests which have ended, for
    requests that begin alike: the next turn of a conversation, the other answers to a prompt. With
    more, more conversations go on without computing their prompts again; with 0 each request
    computes its whole prompt.
    """
    prefix_age: Count = 0
    """How many versions old the weights may be that computed these keys and values. 0 uses only
    those of the weights now served. Larger computes less after each handover, with more mismatch
    between engine and trainer, and tokens say so in their key versions.
    """


class GatewaySection(Section):
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback exposes the endpoint."""
    port: Count = 0
    """0 takes a free port."""
    hosts: tuple[str, ...] = ()
    """Names by which clients may ask an endpoint on loopback, beside loopback's own, such as that
    of a proxy; `*` is any. If any name were allowed, a web page could make its visitors' browsers
    ask (DNS rebinding).
    """
    public_url: str = ""
    """The beginning of the addresses of sessions given over HTTP, and of `client.public_url`, for
    agents on other machines, such as `https://proxy.example`. If it is empty, they have the address
    of the connection that asked. The endpoint answers to its name too.
    """
    private_metrics: bool = False
    """`/metrics` asks for the control token."""
    strict: bool = False
    """Refuse by name fields that have no effect on the text, and limits above the room there is.
    Without this option such a field is ignored and named in a header of the answer
    (`x-midflight-ignored`), and such a limit is lowered (`x-midflight-clamped`).
    """
    request_seconds: Seconds = 120.0
    """How long an answer may go without one new token on an engine that serves it; pauses, and
    waits for an engine that is full or away, do not count. Larger waits longer for an answer that
    an engine has lost. A session's generation survives the loss of its client for a fourth of that,
    and so does its answer, for a retry.
    """
    max_sessions: Positive = 10_000
    """Live sessions, and requests under way; further ones are answered 429."""
    drain_seconds: NonNegative = 20.0
    """An engine that leaves the run may finish its requests for so long; the others go on on other
    engines. Larger moves fewer requests, and lets go of machines later.
    """
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen_coder"] = "auto"
    """How the model writes tool calls; `auto` finds it in the chat template or the special tokens,
    else it is `hermes`; `none` reads no calls but forced ones, in Hermes form.
    """
    reasoning_format: Literal["auto", "none", "think", "mistral"] = "auto"
    """The markers between which the model thinks before it answers; `auto` finds them as above,
    `none` leaves thinking in the content.
    """
    shards: Positive = 1
    """Rollout processes that `train` starts, each with a gateway, agents, buffer and store of its
    own and an equal part of the groups; larger serves more requests on more cores.
    """
    session_seconds: Seconds = 3600.0
    """A session opened over HTTP ends after this long without a request, and its record is kept as
    long for its owner; larger waits longer for late rewards.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the endpoint answers to, beside those of loopback: `hosts`, and that of
        `public_url`.
        """
        public = urlsplit(self.public_url).hostname
        return (*self.hosts, public) if public else self.hosts


class EnvironmentSection(Section):
    entry: str | None = None
    """`module:function` of the environment: a function `(task, client) -> reward`, async or plain,
    or a class with `reset` and tools. Without it the built-in loop runs where there are rewards or
    tools; else one answer is compared with `answer`.
    """
    rewards: tuple[RewardSection, ...] = ()
    """Functions that score a rollout. Beside an `entry` they get the `fields` of its `Result`."""
    tools: tuple[str, ...] = ()
    """`module:function` of each tool of the built-in loop, or `module:Class` of one with state."""
    mcp: tuple[McpSection, ...] = ()
    """Servers whose tools the built-in loop has too."""
    system: str = ""
    """A system message that the built-in loop begins with, where the task has none."""
    sandbox: SandboxSection = SandboxSection()
    """The sandbox of code that the model wrote, for reward functions that have a parameter
    `sandbox`.
    """
    untracked: UntrackedSection = UntrackedSection()
    """The model behind judges and simulated users of an `entry`."""
    max_turns: Positive = 8
    """Answers of one rollout of the built-in loop: it goes on while tools are called; larger lets
    it call more.
    """
    tool_seconds: Seconds = 30.0
    """Deadline of one call of a tool; past it the model is told so. Larger waits longer for a tool
    that hangs.
    """
    tool_concurrency: Positive = 64
    """Calls under way at once in one worker; larger puts more load on the services of the tools."""
    template_options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Variables of the chat template in the built-in loop, such as `{ enable_thinking = false }`.
    The template of models made here takes `list_tools`.
    """
    workers: Count | None = None
    """Processes that run agents; larger runs more agents at once that block or compute. 0 runs them
    in the rollout process, where an agent that blocks stops everything. Default: half the cores,
    from 2 to 8; 0 for Midflight's own environments.
    """
    worker_mb: Positive | None = None
    """Memory of a worker's own data, in MB. An agent that takes more gets a `MemoryError`. A plain
    agent's thread counts with the size of its stack, often 8. Larger bears more. None is no limit.
    """
    max_processes: Positive | None = None
    """Processes that one rollout in a worker may start; one more fails it as `TooManyProcesses`.
    Larger bears more. None is no limit.
    """
    sources: tuple[SourceSection, ...] = (SourceSection(dataset="spell_backward"),)
    """The sources of tasks."""
    max_tokens: Positive = 16
    """Output tokens of one request unless the agent asks otherwise; larger allows longer answers.
    Default with `model.path`: a quarter of the context, from 16 to 256.
    """
    temperature: Above0 = 1.0
    """Sampling temperature of the policy; larger explores more."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this much probability together; larger keeps more.
    Below 1 the trainer normalises over the kept tokens too, where engines record them.
    """
    top_k: Positive | None = None
    """Sample from so many of the likeliest tokens; larger keeps more. None keeps all."""
    min_p: Fraction = 0.0
    """Sample from tokens at least this likely, relative to the likeliest; larger keeps fewer."""
    count_all_choices: bool = False
    """Train on every choice of a request with n > 1. By default only the choices that the agent
    went on from are trained, if it went on from any.
    """
    rollout_seconds: Seconds = 60.0
    """Time that the agent of one rollout may take by itself: without a request under way at the
    gateway, without a tool that runs within its own limit, and with a place to run. Scoring a group
    has as much. A hung agent keeps its slot until then: larger waits longer for it, and so do
    steps.
    """
    max_rollout_seconds: Seconds | None = None
    """Time that a whole rollout may take, its requests included. Time without a place to run, and
    without any engine that takes requests, does not count. It ends agents that ask for ever; larger
    lets rollouts be longer. Default: four times `rollout_seconds` and the time of `max_tokens` in
    each turn at the rate that was measured; the dry run shows it.
    """

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request that gives none."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


class RolloutSection(Section):
    """The six knobs of asynchrony, and the shape of a batch."""

    groups_per_step: Positive = 16
    """B: groups (tasks) one step trains on; larger gives a steadier gradient and a slower step."""
    group_size: Positive = 8
    """n: rollouts of one task; larger estimates the advantage better."""
    max_in_flight: Positive | None = None
    """Rollouts running at once; larger hides more latency and makes tokens older. Default: as many
    as the engines hold just now, at most (S + 1) * B * n.
    """
    max_staleness: Count = 4
    """S: no trained token is older than this many versions. 0 is the synchronous loop."""
    stale_policy: StalePolicy = StalePolicy.WAIT
    """How groups are treated that would grow too old."""
    pause_mode: PauseMode | Literal["auto"] = "auto"
    """How engines pause for a commit: keep, recompute, abort, drain, or `auto` by the engine's
    capabilities.
    """
    buffer_groups: Positive | None = None
    """Finished groups that may wait, in a quarter of the machine's memory; larger absorbs more
    variation. Default (S + 1) * B; less than B is refused.
    """
    min_group_size: Positive | None = None
    """Fewer scored rollouts than this drop the group. Default: half of `group_size`."""
    retries: Count = 1
    """How often a rollout whose infrastructure failed is tried again."""
    show_every: Count = 0
    """Steps between completions that terminal and journal show, with prompt and reward; 0 shows
    none. Larger shows fewer.
    """
    show_completions: Positive = 2
    """How many of the step's rollouts are shown then, the first of each group in turn; larger shows
    more.
    """
    drop_zero_spread: bool = False
    """Drop groups whose rewards are all equal, and draw others (DAPO's dynamic sampling)."""


class SuiteSection(Section):
    """An evaluation of its own beside the usual one, which asks each held-out task once as training
    does.
    """

    name: str
    """Its name in journal and metrics: `NAME/SOURCE`."""
    samples: Positive = 1
    """Answers to each task; larger measures better and takes as many times as long."""
    temperature: NonNegative | None = None
    """The temperature of these answers; 0 is greedy. Default: `environment.temperature`."""
    pass_at: tuple[Positive, ...] = ()
    """The k of pass@k and best@k, at most `samples`. Default: 1 and `samples`."""
    passes: float = 1.0
    """The reward from which an answer has passed; larger asks more."""
    sources: tuple[str, ...] = ()
    """The names of the sources whose held-out tasks it asks. Empty is all."""

    @property
    def ks(self) -> tuple[int, ...]:
        return self.pass_at or tuple(sorted({1, self.samples}))


class EvaluationSection(Section):
    eval_every: Count = 0
    """Steps between evaluations on held-out tasks; 0 evaluates before and after only."""
    pin_seconds: Seconds = 60.0
    """How long a new version waits for an evaluation where no other engine could take it; larger
    loses fewer results and lets training stand longer.
    """
    suites: tuple[SuiteSection, ...] = ()
    """Further evaluations, made whenever the usual one is."""


class TrainerSection(Section):
    learning_rate: Above0 = 3e-4
    """Peak step size of AdamW; larger learns faster, until the model forgets its skills. Default
    with `model.path`, by the number of parameters: 0.0003 up to 3 million, 2e-05 at 135 million,
    1e-06 from 7 billion; ten times that with `[lora]`.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to zero over the run."""
    warmup_steps: Count = 5
    """Steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled decay; larger shrinks weights more."""
    max_grad_norm: Above0 = 1.0
    """Gradients of larger L2 norm are scaled down to it."""
    micro_batch_tokens: Positive = 4096
    """Tokens of one forward and backward; larger is faster and takes more memory. Default with
    `model.path` on CPUs: as many as an eighth of the machine's memory holds activations of, from
    512 to 4096.
    """
    updates_per_step: Positive = 1
    """Mini-batch updates in a step; above 1 the proximal policy is computed at the step's start."""
    on_alarm: Literal["warn", "skip", "stop"] = "warn"
    """The effect of a reading that says that training is off its distribution: warn, skip the step,
    or stop the run.
    """
    max_missing_share: Fraction = 0.1
    """Share of a batch's tokens that may come without a log-probability; they are masked and
    counted, and more of them end the run.
    """
    ranks: Positive = 1
    """Trainer processes that share each step, with the model sharded over them; on a GPU machine
    one for each GPU.
    """
    compute_dtype: Literal["auto", "bfloat16"] = "auto"
    """Precision of the forward and backward; `auto` is that of the weights. bfloat16 beside float32
    weights is faster on GPUs and slower on CPUs without AMX; the optimiser keeps the full
    precision.
    """
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the rest again: less memory, about
    a third more time.
    """
    compile: bool = False
    """Compile the layers' feed-forward parts with torch.compile: slower to start, and no faster on
    CPUs.
    """
    threads: Positive = 1
    """CPU threads of one trainer process."""
    device: str = "cpu"
    """The device that the trainer computes on: `cpu`, `cuda`, which gives each rank a GPU of its
    own, or such as `cuda:1`.
    """
    devices: tuple[Count, ...] = ()
    """Numbers of the ranks' GPUs on this machine, one for each rank. Default: the free ones, the
    lowest first. On a cluster Ray chooses.
    """
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept; larger takes more disk."""


class LoraSection(Section):
    """Low-rank adapters of a frozen base, trained in place of all weights; only they go to the
    engines. Needs `pip install 'midflight[lora]'`.
    """

    rank: Positive | None = None
    """Width of the adapters; larger learns more, and sends more with each version. None trains all
    weights.
    """
    alpha: Above0 | None = None
    """The adapters' output is scaled by alpha / rank; larger learns faster. Default 2 * rank."""
    targets: tuple[str, ...] = ()
    """Last words of the names of the layers that get one, such as `q_proj`; empty is every linear
    layer but the output layer. Experts and routers of a mixture are no linear layers, and get
    none.
    """
    merged: bool = False
    """Whether servers get whole weights, the adapters merged into them, in a pause for each
    version; else they keep versions side by side. This is for models that a server's own LoRA does
    not take.
    """


class WarmStartSection(Section):
    """Supervised fine-tuning before reinforcement learning, on the answers of the sources' tasks or
    on conversations. It stops on accuracy, not on steps. There is none without `target_accuracy`
    and `data`.
    """

    data: Path | None = None
    """Conversations to learn from, such as one of a tool's use, as JSON lines with `messages`
    (OpenAI's, with their tool calls) and, where the model should see some, `tools`. Every message
    of the assistant is learnt. None learns the `answer` of the sources' tasks.
    """
    target_accuracy: Fraction | None = None
    """Stop once held-out exact match, sampled at the run's temperature, reaches this: of held-out
    tasks of the first source, or of the assistant's messages in an eighth of the conversations;
    larger trains longer. Without it `data` is learnt for `max_steps`.
    """
    learning_rate: Above0 = 2e-3
    """Peak step size; larger learns faster, until the model forgets its skills. Default with
    `model.path`: ten times `trainer.learning_rate`'s for whole weights, at most 0.002.
    """
    max_steps: Positive = 2000
    """Gives up (and goes on) after this many steps."""
    examples_per_step: Positive = 64
    """Answers that one step learns from; larger makes steps steadier and slower."""
    evaluate_every: Positive = 25
    """Steps between looks at the accuracy."""

    @property
    def is_made(self) -> bool:
        return self.target_accuracy is not None or self.data is not None


class WeightsSection(Section):
    transport: Literal["auto", "shared_memory", "pull", "direct"] = "auto"
    """How bytes reach the engines: shared_memory on one machine, pull between machines, from any
    process that has them, direct by broadcast into the workers of vLLM and SGLang, which only swap
    in their pause. auto chooses by size and place, and `--dry-run` says which one it takes, and
    why.
    """
    every: Positive = 1
    """Steps from one version that is published to the next, at most `rollout.max_staleness` + 1.
    Every step makes a version, and ages count steps; larger hands over less often and trains on
    older tokens.
    """
    stage_seconds: Seconds = 60.0
    """Deadline of staging on one engine; past it the engine is quarantined."""
    commit_seconds: Seconds = 30.0
    """Deadline of the commit, the pause included."""
    commit: Literal["rolling", "barrier"] = "rolling"
    """rolling: one engine after the other, so that the others generate; barrier: all at once, so
    that no two versions are ever served together.
    """
    max_paused: Positive = 1
    """Engines that are committed at once with `commit = "rolling"`. Larger brings a version to many
    engines sooner, and takes more of them out of generation meanwhile.
    """
    delta: bool = False
    """Send only the changes since the version before, and every 16th version whole. These are
    fewer bytes where steps are small and the served precision is coarse.
    """


class ObserveSection(Section):
    trackers: tuple[str, ...] = ()
    """Trackers that get numbers, histograms, samples and plots of a run, beside its folder:
    `tensorboard`, `wandb`, `mlflow`, `trackio`, `otel` (traces of rollouts), each an extra of that
    name, or `module:Class` of one's own (metrics.md).
    """
    project: str = "midflight"
    """The project under which trackers list the run, beside other runs."""
    samples: bool = False
    """The terminal shows the last rollout, as `--samples` does."""
    view: Literal["auto", "off"] = "auto"
    """`auto`: a run whose viewer is installed (`midflight[view]`) has an address for it, and
    `/dashboard` of its gateway leads there; the viewer is a process of its own, started for its
    first visitor.
    """
    view_port: int = Field(default=0, ge=0, le=65535)
    """The port on loopback that the viewer of a run listens on; 0 takes a free one."""
    log_format: Literal["plain", "json"] = "plain"
    """How logs and a terminal that cannot be redrawn are written: as text, or as one JSON object a
    line, as by `--log-format json`.
    """


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    gateway: GatewaySection = GatewaySection()
    environment: EnvironmentSection = EnvironmentSection()
    curriculum: CurriculumSection = CurriculumSection()
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    trainer: TrainerSection = TrainerSection()
    objective: ObjectiveSection = ObjectiveSection()
    correction: CorrectionSection = CorrectionSection()
    critic: CriticSection = CriticSection()
    lora: LoraSection = LoraSection()
    distillation: DistillationSection = DistillationSection()
    warm_start: WarmStartSection = WarmStartSection()
    weights: WeightsSection = WeightsSection()
    observe: ObserveSection = ObserveSection()
    cluster: ClusterSection = ClusterSection()
