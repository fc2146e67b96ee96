"""Reinforcement learning of a language model, synchronous, in one file.

Read it from top to bottom. It samples answers, scores them, takes one gradient step, and begins
again; nothing overlaps. Midflight does the same with all parts running at once. With `max_staleness
= 0` it must give the same tokens, losses and weights as this file (invariant I2), which is why
everything that decides a number is written out here: the noise, the seeds, the loss.

    python examples/one_file_grpo.py

That makes a tiny model, warms it up and trains it, in half a minute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Task = tuple[str, str]
"""A question and the one answer that earns a reward."""

# --- 1. Text --------------------------------------------------------------------------------------
# One token per byte, and a few tokens that no text contains.
END = 256
USER = 257
ASSISTANT = 258
PAD = 261
VOCAB = 262


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def chat(question: str) -> list[int]:
    """The user's message, then the opening of the model's own."""
    return [USER, *encode(question), END, ASSISTANT]


# --- 2. Noise -------------------------------------------------------------------------------------
# A function of (seed of the request, position of the token, candidate token), never of what was
# drawn before: an answer comes out the same whether it is sampled alone or in a batch, in one go or
# with interruptions.

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's scrambler, on unsigned 64-bit integers that wrap around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gumbel(seed: int, position: int) -> np.ndarray:
    """The noise of every candidate for the token at `position` (counted from the start of the
    prompt). [VOCAB]
    """
    key = mix(mix(np.array([seed], np.uint64)) + np.array([position + 1], np.uint64) * GAMMA)
    bits = mix(key + np.arange(1, VOCAB + 1, dtype=np.uint64) * GAMMA)
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def request_seed(
    name: str, seed: int, *, epoch: int, index: int, sample: int, prompt: list[int]
) -> int:
    """A seed that says which request this is: run, place in the task stream, first attempt, sample,
    first such prompt.
    """
    label = f"{name}|{seed}|{epoch}|{index}|0|{sample}|0|"
    digest = hashlib.blake2b(
        label.encode("ascii") + np.array(prompt, "<i4").tobytes(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little")


# --- 3. Sampling ----------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One attempt at one task."""

    prompt: list[int]
    answer: list[int]
    """The sampled tokens, END included unless the limit came first."""
    logprobs: list[float]
    """Of each sampled token under the policy that sampled it, rounded to float32 as it travels
    between processes.
    """
    reward: float = 0.0
    advantage: float = 0.0


@torch.no_grad()
def sample_group(
    model: PreTrainedModel,
    prompt: list[int],
    seeds: list[int],
    *,
    max_tokens: int,
    temperature: float,
) -> list[Rollout]:
    """One answer per seed. All grow in step, so those still unfinished have equal lengths and need
    no padding.
    """
    rollouts = [Rollout(prompt, [], []) for _ in seeds]
    for position in range(len(prompt), len(prompt) + max_tokens):
        growing = [i for i, r in enumerate(rollouts) if r.answer[-1:] != [END]]
        if not growing:
            break
        ids = torch.tensor([prompt + rollouts[i].answer for i in growing], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        logprobs = (logits.double().cpu() / temperature).log_softmax(-1)
        for i, row in zip(growing, logprobs, strict=True):
            # Gumbel-max: the largest of log p + noise is a sample from p.
            token = int((row + torch.from_numpy(gumbel(seeds[i], position))).argmax())
            rollouts[i].answer.append(token)
            rollouts[i].logprobs.append(float(row[token].float()))
    return rollouts


def exact_match(rollout: Rollout, answer: str) -> float:
    return float(
        decode(
            rollout.answer[: rollout.answer.index(END)] if END in rollout.answer else rollout.answer
        )
        == answer
    )


# --- 4. From rewards to a loss --------------------------------------------------------------------


def set_advantages(group: list[Rollout]) -> None:
    """GRPO: how much better than its siblings an answer was, in standard deviations of the group
    (with n - 1).
    """
    rewards = np.array([r.reward for r in group], np.float64)
    deviation = rewards.std(ddof=1) if len(group) > 1 else 0.0
    for rollout, advantage in zip(
        group, (rewards - rewards.mean()) / (deviation + 1e-6), strict=True
    ):
        rollout.advantage = float(advantage)


def token_logprobs(model: PreTrainedModel, rollout: Rollout, *, temperature: float) -> torch.Tensor:
    """Of the answer's tokens under the current weights. The logits at a token predict the next one,
    hence the shift.
    """
    ids = torch.tensor(rollout.prompt + rollout.answer, device=model.device)
    logits = model(ids[None], use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(-1, ids[len(rollout.prompt) :, None])
        .squeeze(-1)
    )


def token_losses(policy: torch.Tensor, behaviour: torch.Tensor, advantage: float) -> torch.Tensor:
    """Decoupled PPO with truncated importance sampling, per token:

        L = -min(rho, 2) min(r A, clip(r, 0.8, 1.28) A),    rho = proximal / behaviour,    r =
        policy / proximal

    With one update per step the proximal policy is the policy itself, held fixed: r is 1 in value
    and carries the gradient. Here rho is 1 too, but for rounding; in the asynchronous system it is
    not, and then the weight corrects for it.
    """
    proximal = policy.detach()
    weight = (proximal - behaviour).clamp(-20, 20).exp().clamp(max=2.0)
    ratio = (policy - proximal).exp()
    return -weight * torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.28) * advantage)


# --- 5. The loop ----------------------------------------------------------------------------------


@dataclass
class Step:
    """What one step sampled and what came of it."""

    rollouts: list[Rollout]
    """Groups one after the other."""
    loss: float

    @property
    def mean_reward(self) -> float:
        return float(np.mean([r.reward for r in self.rollouts]))


def run(
    model: PreTrainedModel,
    tasks: Sequence[Task],
    *,
    steps: int,
    groups: int,
    samples: int,
    max_tokens: int = 16,
    temperature: float = 1.0,
    learning_rate: float = 3e-4,
    warmup_steps: int = 5,
    max_grad_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    run_name: str = "run",
    run_seed: int = 0,
) -> list[Step]:
    """Trains `model` in place on `tasks` in their order, `groups` tasks a step and `samples`
    answers a task.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.0)
    model.eval()  # No dropout: the policy that is trained is the one that samples.
    history: list[Step] = []
    for number in range(steps):
        rollouts: list[Rollout] = []
        for place in range(number * groups, (number + 1) * groups):
            epoch, index = divmod(place, len(tasks))
            question, answer = tasks[index]
            prompt = chat(question)
            seeds = [
                request_seed(run_name, run_seed, epoch=epoch, index=index, sample=s, prompt=prompt)
                for s in range(samples)
            ]
            group = sample_group(
                model, prompt, seeds, max_tokens=max_tokens, temperature=temperature
            )
            for rollout in group:
                rollout.reward = exact_match(rollout, answer)
            set_advantages(group)
            rollouts += group

        optimizer.zero_grad()
        num_tokens = sum(len(r.answer) for r in rollouts)
        loss = 0.0
        for rollout in rollouts:
            policy = token_logprobs(model, rollout, temperature=temperature)
            behaviour = torch.tensor(rollout.logprobs, dtype=policy.dtype, device=policy.device)
            share = token_losses(policy, behaviour, rollout.advantage).sum() / num_tokens
            share.backward()
            loss += float(share.detach())
        for options in optimizer.param_groups:
            options["lr"] = learning_rate * min(1.0, (number + 1) / max(1, warmup_steps))
        # else no group has a spread: nothing to learn
        if clip_grad_norm_(model.parameters(), max_grad_norm) > 0:
            optimizer.step()

        history.append(Step(rollouts, loss))
        print(
            f"step {number + 1:3d}   mean reward {history[-1].mean_reward:.3f}   loss {loss:+.4f}",
            flush=True,
        )
    return history


# --- 6. A model to begin with ---------------------------------------------------------------------


def load(folder: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a Hugging Face folder. Its tokenizer must be the one of section 1."""
    return AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True
    ).type(dtype)


def make(*, hidden_size: int = 64, num_layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """A tiny decoder with random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            head_dim=hidden_size // 4,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


def warm_up(
    model: PreTrainedModel, tasks: Sequence[Task], *, steps: int, learning_rate: float = 3e-3
) -> None:
    """Supervised steps on the right answers: a policy that is never right gives reinforcement
    learning nothing to reinforce.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for number in range(steps):
        question, answer = tasks[number % len(tasks)]
        example = Rollout(chat(question), [*encode(answer), END], [])
        optimizer.zero_grad()
        (-token_logprobs(model, example, temperature=1.0).mean()).backward()
        optimizer.step()


def words(*, size: int, seed: int) -> list[Task]:
    """Words to be spelled backward."""
    from reasoning_gym import create_dataset

    entries = create_dataset("spell_backward", size=size, seed=seed, min_word_len=3, max_word_len=3)
    return [(entry["metadata"]["word"], entry["answer"]) for entry in entries]


if __name__ == "__main__":
    torch.set_num_threads(1)
    policy = make()
    lesson = words(size=32, seed=0)
    warm_up(policy, lesson, steps=700)
    run(policy, lesson, steps=30, groups=8, samples=8, max_tokens=6, learning_rate=2e-3)
