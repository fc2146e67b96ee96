"""Draws configurations: a small sound one, and over it values for a few options of the whole table, edges and mistakes above all."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from midflight.config.options import Option, options

Table = dict[str, dict[str, Any]]
OWN = "tests.fuzz.own"
LONG = "x" * 300
BASE: Table = {
    "run": {"folder": "run", "steps": 1},
    "model": {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 128},
    "environment": {"max_tokens": 4, "sources": [{"path": "rows.jsonl", "answer": "answer", "heldout": 1}]},
    "rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1},
    "trainer": {"checkpoint_every": 0},
}
MEMBERS: dict[str, dict[str, Any]] = {
    "environment.rewards": {"entry": f"{OWN}:score"},
    "environment.sources": {"path": "rows.jsonl", "answer": "answer"},
    "environment.mcp": {},
    "evaluation.suites": {"name": "suite"},
    "engine.servers": {},
}
"""A member of each list of tables, which options are drawn over."""
TEXTS = ("", "x", " ", "a/b", "../x", "[b]", "é\n", "\0", "none", LONG)
KNOWN: dict[str, Sequence[Any]] = {
    "run.folder": ("run", "a b", "deep/er/run", LONG, "run\0", "rows.jsonl", "/proc/run", "", "."),
    "run.store_folder": ("none", "here", "/proc/x", "STORE", ""),
    "model.path": ("none", "model", "nowhere", "", "rows.jsonl"),
    "engine.python": ("none", "PYTHON", "/absent/python", sys.executable),
    "engine.urls": ([], ["LIVE"], ["banana"], ["LIVE", "LIVE"], [""]),
    "engine.arguments": ([], ["--x"], [""]),
    "engine.device": ("cpu", "cuda", "cuda:0", "cpu:0", ""),
    "trainer.device": ("cpu", "cuda", "cuda:0", "cpu:0", ""),
    "engine.servers.*.host": ("", "far"),
    "gateway.host": ("127.0.0.1", "localhost", "0.0.0.0", "::1", "", " ", "\0"),
    "gateway.port": (0, 1, 65535, 65536, -1, 8080),
    "observe.view_port": (0, 1, 65535, 65536, -1, 8080),
    "gateway.hosts": ([], ["proxy.example"], ["*"], [""], ["http://x"]),
    "gateway.public_url": ("", "https://proxy.example/a", "banana", "http://[::1", "http://a:b", "http://a:99999"),
    "environment.entry": ("none", f"{OWN}:solve", f"{OWN}:Solver", f"{OWN}:Counting", f"{OWN}:absent", "x", ""),
    "environment.rewards.*.entry": (f"{OWN}:score", f"{OWN}:best_of_all", f"{OWN}:absent", "x", ""),
    "environment.rewards.*.options": ({}, {"strict": True}),
    "environment.tools": ([], [f"{OWN}:double"], [f"{OWN}:Counting"], [f"{OWN}:double", f"{OWN}:double"], ["x"]),
    "environment.mcp.*.command": ([], [""]),
    "environment.mcp.*.url": ("",),
    "environment.mcp.*.env": ({}, {"A": "b"}, {"A": 1}),
    "environment.sandbox.kind": ("bubblewrap", "trusted", "docker", "chroot", "no_such:Box", ""),
    "environment.untracked.url": ("", "LIVE", "http://127.0.0.1:9/v1", "banana"),
    "environment.untracked.api_key_env": ("", "PATH", "NO_SUCH_KEY"),
    "environment.untracked.engines": (0, 1, 2, -1, 10**9),
    "environment.template_options": ({}, {"list_tools": True}, {"messages": 1}, {"a b": None}),
    "environment.sources.*.dataset": ("none", ""),
    "environment.sources.*.path": ("rows.jsonl", "rows.csv", "none", "absent.jsonl", "empty.jsonl", "", "."),
    "environment.sources.*.entry": ("none", f"{OWN}:rows", f"{OWN}:absent", "x", ""),
    "environment.sources.*.size": ("none", 1, 2, 20, 0, -1, 10**18),
    "environment.sources.*.heldout": ("none", 0, 1, 2, 11, 12, -1, 0.25, 0.99, 1.0, 1e-9, "held.jsonl", "absent.jsonl", 10**18),
    "environment.sources.*.prompt": ("{question}", "question", "{absent}", "{", "", "{question:>5}", "{question.x}", "{0}", "messages"),
    "environment.sources.*.answer": ("answer", "", "absent", "question"),
    "environment.sources.*.id": ("", "question", "kind", "absent"),
    "environment.sources.*.content": ("", "question", "kind", "absent"),
    "environment.sources.*.only": ("", ".*", "what.*", "[", "nothing"),
    "environment.sources.*.options": ({}, {"size": 3}, {"no_such": 1}),
    "evaluation.suites.*.name": ("suite", "a/b", "", "rows"),
    "evaluation.suites.*.sources": ([], ["rows"], ["absent"], [""]),
    "evaluation.suites.*.pass_at": ([], [1], [1, 2], [0], [10**9]),
    "evaluation.suites.*.samples": (1, 2, 3, 0, 10**9),
    "objective.kind": (*(options()["objective.kind"].choices[:-1]), f"{OWN}:loss", f"{OWN}:absent", "x"),
    "lora.targets": ([], ["q_proj"], ["query"], [""]),
    "distillation.teacher": ("none", "model", "nowhere"),
    "warm_start.data": ("none", "talk.jsonl", "absent.jsonl"),
    "observe.trackers": ([], ["tensorboard"], [f"{OWN}:Silent"], ["x"], ["tensorboard", "tensorboard"]),
    "cluster.kind": ("local", "slurm"),
    "cluster.token_file": ("none", "absent"),
    "cluster.engine": ("none", {}, {"CPU": 1}, {"CPU": -1}),
    "cluster.trainer": ("none", {"GPU": 0.5}),
    "cluster.rollout": ("none", {"CPU": 10**9}),
}
"""What may be said of options whose values mean something outside the configuration. `LIVE` is a server that answers, `STORE` a folder."""
FEW = ("rollout.groups_per_step", "rollout.group_size", "environment.max_turns", "engine.count", "gateway.shards")
"""A step takes as many times as long. Either it is made, or the number is one that nobody could wait for."""
FOREIGN: tuple[Any, ...] = (None, True, "x", 1.5, [1], {"a": 1}, [])
BOUND = re.compile(r"[<>]=? (\S+)")


def values_of(option: Option) -> list[Any]:
    """What is tried of an option, the simplest first."""
    if option.key in KNOWN:
        return list(KNOWN[option.key])
    if option.choices:
        return [*option.choices, "banana"]
    if option.key in FEW:
        return [1, 2, 3, 4, 0, 10**9, 10**18]
    values: list[Any] = []
    if option.kind.startswith("a whole number"):
        values = [0, 1, 2, 3, 4, 8, 64, 1000, -1, 10**6, 10**9, 2**31, 2**63, 2**64 + 1]
    elif option.kind.startswith("a number"):
        values = [1.0, 0.0, 0.5, 2.0, 0.99, 1e-3, 1e-9, 100.0, 1e6, -1.0, 1e-300, 1e300, float("inf"), float("nan")]
    elif option.kind == "true or false":
        values = [False, True]
    elif option.kind == "a table":
        values = [{}, {"a": 1}]
    elif option.kind.startswith("a list of whole"):
        values = [[], [0], [0, 0], [-1], [10**9]]
    elif option.kind.startswith("a list"):
        values = [[], ["x"], [""], ["x", "x"]]
    else:
        values = list(TEXTS)
    for bound in map(float, BOUND.findall(option.limits)):
        if option.kind.startswith("a whole"):
            values += [int(bound) - 1, int(bound), int(bound) + 1]
        else:
            values += [bound, bound * 0.999, bound * 1.001]
    if option.optional:
        values.append("none")
    return list({repr(value): value for value in values}.values())


KEYS = [key for key, option in options().items() if not option.is_list]
POOLS = {key: values_of(options()[key]) for key in KEYS}


@st.composite
def settings_drawn(draw: st.DrawFn, *, most: int = 5) -> dict[str, Any]:
    """Values for a few options. Now and then one is of a kind that the option does not take."""
    keys = draw(st.lists(st.sampled_from(KEYS), max_size=most, unique=True))
    drawn: dict[str, Any] = {}
    for key in sorted(keys):
        is_foreign = draw(st.integers(0, 19)) == 19
        drawn[key] = draw(st.sampled_from(FOREIGN if is_foreign else POOLS[key]))
    return drawn


def table_of(drawn: dict[str, Any], places: dict[str, str]) -> Table:
    """The small configuration with these values over it. `places` says what stands for a word."""
    table: Table = {
        name: {key: [dict(one) for one in value] if key == "sources" else value for key, value in section.items()}
        for name, section in BASE.items()
    }
    for key, value in drawn.items():
        if isinstance(value, str):
            value = places.get(value, value)
        if isinstance(value, list):
            value = [places.get(each, each) if isinstance(each, str) else each for each in value]
        section, _, rest = key.partition(".")
        node: dict[str, Any] = table.setdefault(section, {})
        if ".*." in rest:
            name, _, option = rest.partition(".*.")
            members = node.setdefault(name, [dict(MEMBERS[f"{section}.{name}"])])
            members[0][option] = value
            continue
        *between, option = rest.split(".")
        for name in between:
            node = node.setdefault(name, {})
        node[option] = value
    return table
