"""A trainer that knows nothing of Midflight but its HTTP API: torch and transformers, REINFORCE
with a group baseline.

midflight rollouts configs/demo.toml --folder runs/foreign --set model.path=MODEL_DIR
python examples/foreign_trainer.py runs/foreign/endpoint.json --steps 20
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(endpoint: dict[str, Any], verb: str = "", **body: Any) -> Any:
    """Waits for the answer; None where there is nothing yet. A refusal ends this program with its
    reason.
    """
    headers = {
        "Authorization": f"Bearer {endpoint['control_token']}",
        "Accept": "application/json",
        "Content-Type": "application/json",
    }
    data = json.dumps(body).encode() if body else None
    try:
        with DIRECT.open(
            urllib.request.Request(f"{endpoint['url']}/midflight/v1{verb}", data, headers)
        ) as answer:
            return None if answer.status == 204 else json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{verb}: {error.code} {error.read().decode()}") from None


def group_advantages(rollouts: list[dict[str, Any]]) -> list[float]:
    """How much better a rollout did than the mean of its group."""
    rewards: dict[int, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout["group"], []).append(rollout["reward"])
    return [rollout["reward"] - mean(rewards[rollout["group"]]) for rollout in rollouts]


def step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Any],
    *,
    temperature: float,
) -> float:
    """One update; returns the loss. Tokens sampled under older weights count min(policy /
    behaviour, 2), as in truncated importance sampling.
    """
    advantages = group_advantages(batch["rollouts"])
    num_tokens = max(1, sum(sum(row["loss_mask"]) for row in batch["rows"]))
    total = 0.0
    optimizer.zero_grad()
    for row in batch["rows"]:
        ids = torch.tensor(row["token_ids"])
        mask = torch.tensor(row["loss_mask"])[1:]
        policy = (
            (model(ids[None]).logits[0, :-1].float() / temperature)
            .log_softmax(-1)
            .gather(-1, ids[1:, None])[:, 0]
        )
        behaviour = torch.tensor(row["logprobs"])[1:]
        weight = (policy.detach() - behaviour).exp().clamp(max=2.0)
        loss = -(weight * policy * mask).sum() * advantages[row["rollout"]] / num_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def train(endpoint: dict[str, Any], *, steps: int, learning_rate: float, folder: Path) -> None:
    info = ask(endpoint)
    model = AutoModelForCausalLM.from_pretrained(info["model_path"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    version = info["served_version"]
    for _ in range(steps):
        while (batch := ask(endpoint, "/take", train_version=version, wait_seconds=30)) is None:
            pass
        loss = step(model, optimizer, batch, temperature=info["temperature"])
        version += 1
        # the version served, the one being fetched, and this one
        written = folder / str(version % 3)
        model.save_pretrained(written)
        ask(endpoint, "/done", lease=batch["lease"], version=version, metrics={"loss": loss})
        live = ask(
            endpoint,
            "/weights",
            version=version,
            file=str((written / "model.safetensors").resolve()),
        )
        reward = mean(rollout["reward"] for rollout in batch["rollouts"])
        print(
            (
                f"version {version}: reward {reward:.3f}, loss {loss:+.4f}, served "
                f"{live['served_version']}"
            ),
            flush=True,
        )
    ask(endpoint, "/checkpointed", version=version)
    ask(endpoint, "/finish", version=version)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train on the rollouts of a running `midflight rollouts`."
    )
    parser.add_argument("endpoint", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    chosen = parser.parse_args()
    given = json.loads(chosen.endpoint.read_text())
    train(
        given,
        steps=chosen.steps,
        learning_rate=chosen.learning_rate,
        folder=chosen.endpoint.parent / "weights",
    )
