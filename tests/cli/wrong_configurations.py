"""Configurations that cannot work, each with words of the sentence that refuses it, section by section.

`HERE` holds rows, modules and files that they name; `tests.cli.wrong_code` is code of a user's.
"""

from __future__ import annotations

import json
from pathlib import Path

RUN = """\
[run]
folder = "run"
steps = 1
[model]
hidden_size = 16
intermediate_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
max_context = 64
[environment]
max_tokens = 8
[[environment.sources]]
path = "rows.jsonl"
answer = "answer"
heldout = 1
"""
CODE = "tests.cli.wrong_code"
ENTRY = ("environment.sources.0.path=none", "environment.sources.0.heldout=none")


def source(entry: str, *more: str) -> tuple[str, ...]:
    return (*ENTRY, f"environment.sources.0.entry={CODE}:{entry}", *more)


def rewarded(entry: str, *more: str) -> tuple[str, ...]:
    return (f"environment.rewards.0.entry={CODE}:{entry}", *more)


def write_files(folder: Path) -> None:
    """What the configurations name, besides the sound file of the run."""
    (folder / "run.toml").write_text(RUN)
    rows = [{"question": f"{i}", "answer": f"{i}", "kind": "same"} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": "2"}\n{"question": \n')
    (folder / "empty.jsonl").write_text("")
    (folder / "twice.csv").write_text("question,question\n1,2\n")
    (folder / "ragged.csv").write_text("question,answer\n1,2\n1\n")
    (folder / "rows.xlsx").write_text("no rows")
    (folder / "raises.py").write_text("raise ValueError('half written')\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "dies.py").write_text("import os\nos._exit(0)\n")
    (folder / "no_syntax.py").write_text("def solve(task, client)\n")
    (folder / "talk.jsonl").write_text('{"messages": []}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


WRONG: list[tuple[str, tuple[str, ...]]] = [
    # --- run
    ("run.folder", ("run.folder=rows.jsonl",)),
    ("run.folder", ("run.folder=/proc/run",)),
    ("run.store_folder", ("run.store_folder=store",)),
    ("run.store_folder", ("run.store_folder=/proc/store",)),
    ("run.seed", ("run.seed=-1",)),
    ("run.seed", ("run.seed=1180591620717411303424",)),
    ("run.steps", ("run.steps=0",)),
    ("run.steps", ("run.steps=1.5",)),
    ("run.stop_at_reward", ("run.stop_at_reward=2",)),
    ("run.stall_seconds", ("run.stall_seconds=0",)),
    ("run.stall_seconds", ("run.stall_seconds=inf",)),
    ("run.restarts", ("run.restarts=-1",)),
    ("run.name", ("run.name=",)),
    ("run.step", ("run.step=1",)),
    # --- model
    ("nowhere", ("model.path=nowhere",)),
    ("rows.jsonl", ("model.path=rows.jsonl",)),
    ("config.json", ("model.path=model",)),
    ("model.name", ("model.name=",)),
    ("model.dtype", ("model.dtype=float16",)),
    ("model.num_heads", ("model.num_heads=3",)),
    ("must be even", ("model.hidden_size=6",)),
    ("model.num_kv_heads", ("model.num_kv_heads=3",)),
    ("model.max_context", ("model.max_context=8",)),
    ("model.hidden_size", ("model.hidden_size=1000000000",)),
    ("model.num_layers", ("model.num_layers=1000000000",)),
    # --- engine
    ("engine.kind", ("engine.kind=tgi",)),
    ("engine.count", ("engine.count=0",)),
    ("engine.count", ("engine.count=100000",)),
    ("/absent/python", ("engine.kind=vllm", "engine.python=/absent/python")),
    ("engine.python", ("engine.python=/usr/bin/python3",)),
    ("not installed for", ("engine.kind=sglang", "engine.python=/usr/bin/python3")),
    ("engine.urls", ('engine.urls=["http://127.0.0.1:9"]',)),
    ("engine.urls", ("engine.kind=vllm", 'engine.urls=["banana"]')),
    ("engine.urls", ("engine.kind=vllm", 'engine.urls=["http://127.0.0.1:9"]', "engine.start_seconds=0.3")),
    ("engine.urls", ("engine.kind=sglang", 'engine.urls=["http://no.such.invalid:9"]', "engine.start_seconds=0.3")),
    ("names a server twice", ("engine.kind=vllm", 'engine.urls=["http://127.0.0.1:9", "http://127.0.0.1:9"]')),
    ("engine.arguments", ('engine.arguments=["--x"]',)),
    ("engine.max_running", ("engine.max_running=0",)),
    ("engine.threads", ("engine.threads=100000",)),
    ("engine.device", ("engine.device=mps",)),
    ("engine.device", ("engine.device=cuda",)),
    ("engine.share", ("engine.share=time", "engine.lend=true")),
    ("engine.lend", ("engine.lend=true", "engine.kind=vllm", "engine.python=/usr/bin/python3")),
    ("engine.deterministic", ("engine.deterministic=true",)),
    ("engine.guesses", ("engine.guesses=64",)),
    ("engine.prefix_mb", ("engine.prefix_mb=1000000000",)),
    ("engine.servers.0.host", ('engine.servers=[{host="far"}]',)),
    # --- gateway
    ("gateway.host", ("gateway.host=no.such.invalid",)),
    ("gateway.host", ("gateway.host=10.255.255.1",)),
    ("gateway.host", ("gateway.host=",)),
    ("gateway.port", ("gateway.port=70000",)),
    ("gateway.hosts", ('gateway.hosts=["http://proxy.example"]',)),
    ("gateway.hosts", ('gateway.hosts=[""]',)),
    ("gateway.public_url", ("gateway.public_url=banana",)),
    ("gateway.public_url", ("gateway.public_url=ftp://proxy.example",)),
    ("gateway.public_url", ("gateway.public_url=http://",)),
    ("gateway.public_url", ("gateway.public_url=http://proxy.example:99999",)),
    ("gateway.request_seconds", ("gateway.request_seconds=0",)),
    ("gateway.max_sessions", ("gateway.max_sessions=0",)),
    ("gateway.tool_format", ("gateway.tool_format=xml",)),
    ("gateway.shards", ("gateway.shards=3", "rollout.groups_per_step=2")),
    # --- environment
    ("'no_such_module'", ("environment.entry=no_such_module:solve",)),
    ("module:function", ("environment.entry=solve",)),
    ("has no 'absent'", (f"environment.entry={CODE}:absent",)),
    ("half written", ("environment.entry=raises:solve",)),
    ("sys.exit", ("environment.entry=exits:solve",)),
    ("SyntaxError", ("environment.entry=no_syntax:solve",)),
    ("cannot be run", (f"environment.entry={CODE}:a_number",)),
    ("cannot be called", (f"environment.entry={CODE}:of_one_argument",)),
    ("cannot be run", (f"environment.entry={CODE}:a_stream",)),
    ("cannot be called", (f"environment.entry={CODE}:WithArguments",)),
    ("environment.rewards", rewarded("absent")),
    ("by position only", rewarded("by_position")),
    ("'absent'", rewarded("of_an_absent_column")),
    ("twice", rewarded("reward", f"environment.rewards.1.entry={CODE}:reward")),
    ("no 'strict'", rewarded("reward", "environment.rewards.0.options={strict=true}")),
    ("environment.rewards.0.entry is missing", ("environment.rewards.0.weight=1",)),
    ("environment.rewards", rewarded("reward", "environment.rewards.0.weight=0")),
    ("without environment.rewards", (f'environment.tools=["{CODE}:typed"]',)),
    ("environment.tools", rewarded("reward", f'environment.tools=["{CODE}:untyped"]')),
    ("environment.tools", rewarded("reward", f'environment.tools=["{CODE}:of_odd_type"]')),
    ("two tools called", rewarded("reward", f'environment.tools=["{CODE}:typed", "{CODE}:typed"]')),
    ("environment.entry", (f"environment.entry={CODE}:sound", f'environment.tools=["{CODE}:typed"]')),
    ("a command or a url", rewarded("reward", 'environment.mcp=[{per="run"}]')),
    ("environment.mcp", rewarded("reward", 'environment.mcp=[{url="http://127.0.0.1:9/mcp", start_seconds=0.5}]')),
    ("environment.mcp", rewarded("reward", 'environment.mcp=[{command=["/absent/server"]}]')),
    ("environment.sandbox.kind", ("environment.sandbox.kind=chroot",)),
    ("environment.sandbox.kind", rewarded("in_a_sandbox", "environment.sandbox.kind=chroot")),
    ("environment.sandbox.kind", ("environment.sandbox.kind=no_such_module:Box",)),
    ("environment.sandbox.kind", rewarded("in_a_sandbox", f"environment.sandbox.kind={CODE}:NoSandbox")),
    ("midflight[e2b]", rewarded("in_a_sandbox", "environment.sandbox.kind=e2b")),
    ("environment.sandbox.memory_mb", ("environment.sandbox.memory_mb=0",)),
    ("environment.untracked.url", ("environment.untracked.url=banana",)),
    ("environment.untracked.url", ("environment.untracked.url=http://127.0.0.1:9/v1",)),
    ("environment.untracked.url", ("environment.untracked.url=http://no.such.invalid/v1",)),
    ("NO_SUCH_KEY", ("environment.untracked.url=http://127.0.0.1:9/v1", "environment.untracked.api_key_env=NO_SUCH_KEY")),
    ("environment.untracked.api_key_env", ("environment.untracked.api_key_env=NO_SUCH_KEY",)),
    ("environment.untracked.engines", ("environment.untracked.engines=1",)),
    ("environment.max_turns", ("environment.max_turns=0",)),
    ("environment.workers", ("environment.workers=-1",)),
    ("environment.workers", ("environment.workers=100000",)),
    ("environment.worker_mb", (f"environment.entry={CODE}:sound", "environment.worker_mb=1")),
    ("environment.max_tokens", ("environment.max_tokens=64",)),
    ("environment.temperature", ("environment.temperature=0",)),
    ("environment.temperature", ("environment.temperature=1e-300",)),
    ("environment.top_p", ("environment.top_p=1.5",)),
    ("environment.top_k", ("environment.top_k=0",)),
    ("environment.max_rollout_seconds", ("environment.max_rollout_seconds=0",)),
    # --- sources
    ("environment.sources is empty", ("environment.sources=[]",)),
    ("exactly one of", ("environment.sources.0.dataset=spell_backward",)),
    ("exactly one of", ("environment.sources.0.path=none",)),
    ("spell_backward", ("environment.sources.0.path=none", "environment.sources.0.answer=", "environment.sources.0.dataset=spel_backward")),
    ("absent.jsonl", ("environment.sources.0.path=absent.jsonl",)),
    ("rows.xlsx", ("environment.sources.0.path=rows.xlsx",)),
    ("broken.jsonl:3", ("environment.sources.0.path=broken.jsonl",)),
    ("has no rows", ("environment.sources.0.path=empty.jsonl",)),
    ("twice", ("environment.sources.0.path=twice.csv",)),
    ("ragged.csv:3", ("environment.sources.0.path=ragged.csv", "environment.sources.0.heldout=0")),
    ("LookupError: no such table", source("raises")),
    ("SystemExit", source("ends")),
    ("row 50", source("breaks_off")),
    ("row 50", source("breaking")),
    ("row 50", source("short")),
    ("the same each time", source("shuffled")),
    ("the same each time", source("from_a_set")),
    ("the same each time", source("more_each_time")),
    ("row 0 is int", source("numbers")),
    ("returned str", source("text")),
    ("has no rows", source("nothing")),
    ("has no form in JSON", source("of_objects")),
    ("failed with TypeError", source("raises", "environment.sources.0.options={split='train'}")),
    ("environment.sources.0.weight", ("environment.sources.0.weight=0",)),
    ("environment.sources.0.size", ("environment.sources.0.size=0",)),
    ("environment.sources.0.heldout", ("environment.sources.0.heldout=1.0",)),
    ("environment.sources.0.heldout", ("environment.sources.0.heldout=12",)),
    ("environment.sources.0.heldout", ("environment.sources.0.heldout=absent.jsonl",)),
    ("'absent'", ("environment.sources.0.prompt={absent}",)),
    ("environment.sources.0.prompt", ("environment.sources.0.prompt={",)),
    ("environment.sources.0.prompt", ("environment.sources.0.prompt=",)),
    ("'absent'", ("environment.sources.0.answer=absent",)),
    ("'absent'", ("environment.sources.0.id=absent",)),
    ("ids must be unique", ("environment.sources.0.id=kind",)),
    ("environment.sources.only", ("environment.sources.0.only=[",)),
    ("environment.sources.0", ("environment.sources.0.only=letters",)),
    ("are both called", ("environment.sources.1.path=rows.jsonl",)),
    # --- curriculum, rollout, evaluation
    ("curriculum.target", ("curriculum.target=1",)),
    ("rollout.groups_per_step", ("rollout.groups_per_step=0",)),
    ("rollout.groups_per_step", ("rollout.groups_per_step=1000000000",)),
    ("rollout.buffer_groups", ("rollout.buffer_groups=1",)),
    ("rollout.max_in_flight", ("rollout.max_in_flight=1",)),
    ("rollout.min_group_size", ("rollout.min_group_size=100",)),
    ("rollout.max_staleness", ("rollout.max_staleness=-1",)),
    ("rollout.stale_policy", ("rollout.stale_policy=forget",)),
    ("gateway.max_sessions", ("gateway.max_sessions=4",)),
    ("holds nothing out", ('evaluation.suites=[{name="a", sources=["b"]}]',)),
    ("a slash", ('evaluation.suites=[{name="a/b"}]',)),
    ("pass_at", ('evaluation.suites=[{name="a", pass_at=[2]}]',)),
    # --- trainer and warm start
    ("trainer.learning_rate", ("trainer.learning_rate=0",)),
    ("trainer.learning_rate", ("trainer.learning_rate=1e300",)),
    ("trainer.updates_per_step", ("trainer.updates_per_step=100",)),
    ("trainer.ranks", ("trainer.ranks=100000",)),
    ("trainer.device", ("trainer.device=cuda",)),
    ("trainer.devices", ("trainer.devices=[0]",)),
    ("trainer.compute_dtype", ("trainer.compute_dtype=bfloat16", "model.dtype=bfloat16")),
    ("trainer.warmup_steps", ("trainer.warmup_steps=-1",)),
    ("warm_start.data", ("warm_start.data=absent.jsonl",)),
    ("talk.jsonl:1", ("warm_start.data=talk.jsonl",)),
    ("warm_start.target_accuracy", ("warm_start.target_accuracy=2",)),
    ("warm_start.target_accuracy", ("warm_start.target_accuracy=0.5", "environment.sources.0.heldout=0")),
    # --- the loss
    ("objective.kind", ("objective.kind=pppo",)),
    ("no_such_module", ("objective.kind=no_such_module:loss",)),
    ("one loss per token", (f"objective.kind={CODE}:mean_loss",)),
    ("no gradient", (f"objective.kind={CODE}:no_gradient",)),
    ("does nothing with", ("objective.tau=1",)),
    ("twice", ("objective.kind=ppo", "correction.weight=tis")),
    ("objective.advantage", ("objective.advantage=best",)),
    ("objective.overlong_buffer", ("objective.overlong_buffer=100",)),
    ("correction.low", ("correction.weight=mis", "correction.low=2", "correction.high=1")),
    ("correction.self_normalised", ("correction.weight=off", "correction.self_normalised=true")),
    ("critic.clip", ("critic.clip=0.5",)),
    ("leaves nothing to learn", ("distillation.rewards=false",)),
    ("distillation.teacher", ("distillation.teacher=nowhere",)),
    # --- adapters and weights
    ("lora.targets", ("lora.rank=2", 'lora.targets=["query"]')),
    ("lora.rank", ("lora.rank=100",)),
    ("without lora.rank", ("lora.alpha=2",)),
    ("weights.delta", ("lora.rank=2", "weights.delta=true")),
    ("weights.transport", ("weights.transport=file",)),
    ("weights.every", ("weights.every=9",)),
    ("weights.max_paused", ("weights.max_paused=0",)),
    # --- what is shown, and where it runs
    ("observe.trackers", ('observe.trackers=["tensorbord"]',)),
    ("no_such_module", ('observe.trackers=["no_such_module:T"]',)),
    ("no class derived", (f'observe.trackers=["{CODE}:NoTracker"]',)),
    ("observe.view_port", ("observe.view_port=70000",)),
    ("observe.view_port", ("observe.view_port=TAKEN",)),
    ("observe.view_port", ("observe.view_port=FREE", "gateway.port=FREE")),
    ("gateway.port", ("gateway.port=TAKEN",)),
    ("cluster.kind", ("cluster.kind=slurm",)),
    ("cluster.token_file", ("cluster.kind=ray", "cluster.token_file=absent")),
]
