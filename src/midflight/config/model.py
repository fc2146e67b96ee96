"""The options of the model, and of adapters of it, with their checks."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from midflight.config.section import Above0, Positive, Section


class ModelSection(Section):
    path: Path | None = None
    """A Hugging Face model folder or GGUF file. None: random weights of the sizes below."""
    name: str = "policy"
    """The model id that agents use."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of weights in the trainer, and by default in engines."""
    hidden_size: Positive = 128
    """Width of a random model; larger learns more and runs slower."""
    intermediate_size: Positive = 384
    """Width of its feed-forward layers."""
    num_layers: Positive = 4
    """Its depth."""
    num_heads: Positive = 4
    """Its attention heads; must divide `hidden_size`."""
    num_kv_heads: Positive = 2
    """Its key/value heads; must divide `num_heads`."""
    max_context: Positive = 256
    """Longest prompt plus answer, in tokens; larger takes more memory. Default with `path`: the
    model's limit, as far as memory allows.
    """


class LoraSection(Section):
    """Low-rank adapters are trained in place of all weights. They need `pip install
    'midflight[lora]'`.
    """

    rank: Positive | None = None
    """Width of the adapters; larger learns and sends more. None trains all weights."""
    alpha: Above0 | None = None
    """Scales the adapters by alpha / rank; larger learns faster. Default: 2 * rank."""
    targets: tuple[str, ...] = ()
    """Layers that get one, such as `q_proj`; empty: all linear layers but output, experts and
    routers.
    """
    merged: bool = False
    """Servers get whole merged weights, where their own LoRA does not take the model."""


def model_contradictions(model: ModelSection, *, max_tokens: int) -> Iterator[str]:
    """`max_tokens` are the tokens of an answer."""
    m = model
    if m.path is None and m.hidden_size % m.num_heads:
        yield f"model.num_heads ({m.num_heads}) must divide model.hidden_size ({m.hidden_size})"
    elif m.path is None and (m.hidden_size // m.num_heads) % 2:
        yield (
            f"model.hidden_size / model.num_heads ({m.hidden_size // m.num_heads}) must be even, "
            "because positions rotate pairs of numbers"
        )
    if m.path is None and m.num_heads % m.num_kv_heads:
        yield f"model.num_kv_heads ({m.num_kv_heads}) must divide model.num_heads ({m.num_heads})"
    if max_tokens >= m.max_context:
        yield (
            f"environment.max_tokens ({max_tokens}) must be less than model.max_context "
            f"({m.max_context}), or no token is left for the prompt; lower max_tokens or raise "
            "max_context"
        )


def lora_contradictions(lora: LoraSection) -> Iterator[str]:
    given = [f"lora.{name}" for name in ("alpha", "targets") if getattr(lora, name)]
    if lora.rank is None and given:
        yield (
            f"{given[0]} does nothing without lora.rank; set lora.rank, or remove [lora] to "
            "train all weights"
        )
    if lora.rank is not None and find_spec("peft") is None:
        yield (
            f"lora.rank ({lora.rank}) needs PEFT, which is not installed; pip install "
            "'midflight[lora]'"
        )
