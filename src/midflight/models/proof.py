"""Proofs that a part of a run computes the same as a model: rows to try it on, the model's own
forward to compare it with, and the result.

The reference is the model alone with one row: its eager attention, its own mask and positions, no
cache. A part is right if no log-probability is more than `TOLERANCE` nats away from it, and no
gradient more than that share of its size, in float32.

A large model is not tried itself. Its `stand_in` is: a model of the same configuration with random
weights, a layer or two of each kind, and short windows, which goes through the same code.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from midflight.errors import ConfigError
from midflight.version import __version__

TOLERANCE = 1e-3
"""Nats of a log-probability, and share of a gradient. Rounding in float32 gives 1e-5; a wrong
computation gives more than 1e-2.
"""
Row = NDArray[np.int64]


class Way(StrEnum):
    """The way in which a part computes a model."""

    PACKED = "packed"
    """It computes the model as it computes most models: the trainer has rows laid end to end, the
    engine has sequences in slots, the export has every tensor by its name.
    """
    FALLBACK = "fallback"
    """It is right as well, and slower."""
    WHOLE = "whole"
    """It is right as well, and much slower: the engine keeps nothing of a sequence and computes all
    of it for each token.
    """
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Proof:
    """The result for one part: its way of computing the model, and the worst errors of that way. If
    every way is refused, the errors are those of the best one.
    """

    part: str
    """trainer, engine or export"""
    way: Way
    logprob_error: float | None = None
    """The error in nats."""
    gradient_error: float | None = None
    """The relative error."""
    reason: str = ""
    """The reason why it is not the first way, and the remedy if it is refused."""
    layout: str = ""
    """The layout of the rows in the trainer's micro-batches. Empty for other parts."""

    @property
    def is_right(self) -> bool:
        return self.way is not Way.REFUSED


# --- The model alone ------------------------------------------------------------------------------


@contextmanager
def eagerly(model: PreTrainedModel) -> Generator[None]:
    """Makes the model compute attention by its own plain code inside the block."""
    before = attention_of(model)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention_of(model: PreTrainedModel) -> str:
    """The name of the model's attention function, as `set_attn_implementation` takes it."""
    name = getattr(model.config.get_text_config(), "_attn_implementation", None)
    return cast("str | None", name) or "eager"


def own_logits(model: PreTrainedModel, row: Row) -> Float[Tensor, "T V"]:
    """The model's own logits of one row, with its present attention. It gets nothing but the ids.
    Raises `ConfigError` if the forward raises.
    """
    forget_lengths(model)
    ids = torch.from_numpy(row).to(next(model.parameters()).device)
    with own_forward(model):
        return cast(Tensor, model(input_ids=ids[None], use_cache=False).logits)[0].float()


@contextmanager
def own_forward(model: PreTrainedModel) -> Generator[None]:
    """Turns any error of the model's plain forward inside the block into a `ConfigError`, which
    names the architecture, the error and the remedy.
    """
    try:
        yield
    except Exception as error:  # the code of any architecture may raise anything
        raise ConfigError(
            f"{type(model).__name__}'s own forward in transformers {version('transformers')} "
            f"raises {described(error)}. So the model can be neither trained nor served here. "
            "Correct its config.json, or install a version of transformers that computes it."
        ) from error


def described(error: BaseException) -> str:
    """An error's type and the beginning of its text, in one line."""
    kind = type(error).__name__
    said = " ".join(str(error).split())
    if not said:
        return kind
    if len(said) > _MOST_SAID:
        said = f"{said[:_MOST_SAID]}…"
    return f"{kind}: {said.rstrip('.;:')}"


_MOST_SAID = 300
"""Characters of an error's text. Some errors carry pages after the part that matters."""


def kind_of(model: PreTrainedModel) -> str:
    """The architecture of the model's text, as its configuration names it."""
    return str(model.config.get_text_config().model_type)


@torch.no_grad()
def looks_ahead(model: PreTrainedModel, row: Row) -> str | None:
    """A sentence about a model that is no decoder: the log-probabilities at a token change with the
    tokens after it. None for a decoder.

    Both rows have one length, because rotary frequencies may depend on that.
    """
    middle = len(row) // 2
    other = np.concatenate([row[:middle], np.roll(row[middle:], 1)])
    first = own_logits(model, row)[:middle].log_softmax(-1)
    second = own_logits(model, other)[:middle].log_softmax(-1)
    nats = float((first - second).abs().max())
    if nats <= TOLERANCE:
        return None
    return (
        f"{kind_of(model)} is no decoder: what it says at a token changes with the tokens behind "
        f"it, here by {nats:.2g} nats, so that it cannot be sampled token by token. Choose a "
        "decoder; BERT and its kin are decoders with is_decoder = true in config.json."
    )


def own_logprobs(
    model: PreTrainedModel, row: Row, targets: Row, *, temperature: float
) -> Float[Tensor, " T"]:
    """log softmax(logits / temperature) of the target at each token of the row, with gradient."""
    z = own_logits(model, row) / temperature
    chosen = torch.from_numpy(targets).to(z.device)[:, None]
    return z.log_softmax(-1).gather(-1, chosen).squeeze(-1)


def forget_lengths(model: nn.Module) -> None:
    """Resets rotary frequencies that depend on the longest row so far, so that a row's numbers are
    its own.
    """
    for module in model.modules():
        is_dynamic = "dynamic" in str(getattr(module, "rope_type", ""))
        if is_dynamic and hasattr(module, "original_max_seq_len"):
            rotary = cast(Any, module)
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            frequencies = rotary.original_inv_freq.to(rotary.inv_freq.device)
            rotary.register_buffer("inv_freq", frequencies, persistent=False)


# --- Rows -----------------------------------------------------------------------------------------


LONGEST = 640
"""Tokens of the longest row that is tried with a model itself. Changes beyond it are tried with its
`stand_in`.
"""
PLAIN = 24
"""Tokens of the longest row if nothing depends on length."""
BOUNDARIES = (
    "sliding_window",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "mamba_chunk_size",
    "chunk_size",
    "block_size",
    "original_max_position_embeddings",
)
"""Names that configurations have for a number of tokens after which something changes."""


def boundaries(config: PreTrainedConfig) -> list[int]:
    """Windows, chunks, and positions after which rotary frequencies change, ascending."""
    text: Any = config.get_text_config()
    values: list[object] = [getattr(text, name, None) for name in BOUNDARIES]
    for rope in _ropes(text):
        values += [rope.get(name) for name in BOUNDARIES]
        if rope.get("rope_type") == "dynamic":
            values.append(int(text.max_position_embeddings))
    return sorted({value for value in values if isinstance(value, int) and value > 1})


def _ropes(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters: one set, or one for each kind of layer."""
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    inner = [value for value in rope.values() if isinstance(value, dict)]
    return cast("list[dict[str, Any]]", inner) or [rope]


def rows_to_try(model: PreTrainedModel, *, max_context: int | None = None) -> list[Row]:
    """Four rows: two that begin alike and pass every boundary that fits, a short one, and one in
    between that begins as they do.
    """
    most = min(LONGEST, max_context or LONGEST)
    past_boundaries = [size + 9 for size in boundaries(model.config)]
    fitting = [length for length in past_boundaries if length <= most]
    longest = min(most, max([PLAIN, *fitting]))
    draw = np.random.default_rng(0)
    known = np.setdiff1d(np.arange(3, _vocabulary(model)), list(_special(model.config)))
    row = draw.choice(known, longest)
    fork = 2 * longest // 3
    other = longest - 3
    branch = np.concatenate([row[:fork], draw.choice(known, other - fork)])
    between = np.concatenate([row[:5], draw.choice(known, max(1, longest // 2 - 5))])
    return [row, draw.choice(known, 5), branch, between]


def _vocabulary(model: PreTrainedModel) -> int:
    stated = int(model.config.get_text_config().vocab_size)
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    return min(stated, embeddings.weight.shape[0])


def _special(config: PreTrainedConfig) -> set[int]:
    """Ids that represent an image, a padding or the like. A row of text has none of them."""
    options = [*config.to_dict().items(), *config.get_text_config().to_dict().items()]
    return {
        value
        for name, value in options
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }


# --- A small copy of a large model ----------------------------------------------------------------


SMALL = 50_000_000
"""Parameters of a model that is tried itself: it takes seconds on a core."""
_EARLY = 16
_STAND_IN_SIZES = {
    "vocab_size": 512,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
}


def is_small(model: PreTrainedModel) -> bool:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return num_parameters <= SMALL and next(model.parameters()).dtype == torch.float32


def stand_in(model: PreTrainedModel, *, max_context: int | None = None) -> PreTrainedModel:
    """A model in float32 on the CPU with the first layers of each kind, random weights, few token
    ids and short windows. Its width and all else are the model's.
    """
    config = stand_in_config(model.config, max_context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = cast(PreTrainedModel, type(model)._from_config(config, dtype=torch.float32)).eval()  # pyright: ignore
        draw_weights(found)
    return found


def stand_in_config(config: PreTrainedConfig, max_context: int | None = None) -> PreTrainedConfig:
    """The configuration of a stand-in. Rotary frequencies change early if rows of `max_context`
    tokens would see them change, and else not at all.
    """
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    for name, value in _STAND_IN_SIZES.items():
        held = getattr(text, name, None)
        if isinstance(held, int) and held > value:
            setattr(text, name, value)
    for part in (small, text):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            _forget_id(part, name)
    for rope in _ropes(text):
        _change_early(rope, text, max_context)
    _cut_layers(text)
    return small


_CHANGES_AT = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}
"""The options with the position of the change, for each kind of rotary frequencies that change."""


def _change_early(rope: dict[str, Any], text: Any, max_context: int | None) -> None:
    name = _CHANGES_AT.get(str(rope.get("rope_type")))
    if name is None:
        return
    if max_context is not None and max_context <= (rope.get(name) or getattr(text, name)):
        return
    for held in (rope, text.__dict__):
        if name in held:
            held[name] = _EARLY


def _forget_id(config: Any, name: str) -> None:
    """Removes a special id, which may be none of the few that are left. Some configurations insist
    on having one.
    """
    try:
        setattr(config, name, None)
    except Exception:  # configurations raise errors of their own classes
        setattr(config, name, 0)


def _cut_layers(text: Any) -> None:
    """Keeps as many of the first layers as hold every kind, at least two if there are two.
    Configurations without a list of kinds keep two.
    """
    kinds: list[str] | None = getattr(text, "layer_types", None)
    if kinds:
        holds_every_kind = max(kinds.index(kind) + 1 for kind in set(kinds))
        count = min(len(kinds), max(2, holds_every_kind))
        with suppress(AttributeError):  # some make the list themselves, of the number of layers
            text.layer_types = kinds[:count]
        text.num_hidden_layers = count
    else:
        text.num_hidden_layers = min(2, int(text.num_hidden_layers))


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draws weights that are large enough for a wrong number to show: matrices give sums of unit
    variance, and vectors change by a tenth.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "A_log" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)


# --- Proofs that are kept -------------------------------------------------------------------------


_LIBRARIES = ("transformers", "torch")


def kept_proof(part: str, config: PreTrainedConfig, make: Callable[[], Proof]) -> Proof:
    """The proof of a stand-in. It is made once for each configuration and for our version,
    transformers' and torch's, because it depends on nothing else.
    """
    path = _cache() / f"{_key(part, config)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Proof)
    except (OSError, msgspec.DecodeError):
        made = make()
    with suppress(OSError):  # a home that cannot be written to: then it is proven each time
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(made))
        draft.replace(path)
    return made


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "midflight" / "proofs"


def _key(part: str, config: PreTrainedConfig) -> str:
    """A hash of everything that the proof of a stand-in depends on."""
    versions = [__version__, *(f"{name} {version(name)}" for name in _LIBRARIES)]
    known = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version", "dtype")
    }
    everything = repr((part, versions, sorted(known.items(), key=str)))
    return hashlib.sha256(everything.encode()).hexdigest()


def prove_small(
    part: str,
    model: PreTrainedModel,
    prove: Callable[[PreTrainedModel, int | None], Proof],
    *,
    max_context: int | None = None,
) -> Proof:
    """The proof that `prove` makes for a copy of the model in float32 with rows of up to
    `max_context`. If the model is large, the proof is made for its stand-in.

    The model stays as it is.
    """
    if is_small(model):
        return prove(copy.deepcopy(model).float(), max_context)
    config = stand_in_config(model.config, max_context)
    return kept_proof(part, config, lambda: prove(stand_in(model, max_context=max_context), None))
