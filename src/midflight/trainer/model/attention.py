"""Attention over rows of different lengths laid end to end, without padding and without cross-talk.

Almost everything else in a decoder works token by token, so a micro-batch is one flat row of
tokens. Attention has to know the beginnings of rows, and so have layers with a state (`layers`).
Rows of equal length lie together, and each such run is one call of PyTorch's kernel. Measured
against rows padded to the longest of their micro-batch (128 rows of 15 to 25 tokens, 0.8 M
parameters, one core): 0.19 s against 0.23 s a forward and backward, and the gap grows with the
spread of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from midflight.errors import ConfigError

NAME = "midflight_ragged"
UNKNOWN = ("position_bias",)
"""Arguments that some architectures hand to their attention function and this one does not
compute.
"""


flash_varlen: Callable[..., Any] | None = (
    import_module("flash_attn").flash_attn_varlen_func if find_spec("flash_attn") else None
)
"""FlashAttention's kernel for rows of different lengths, if that package is installed. It takes
half precision on GPUs only.
"""


MAX_PADDING = 1.25
"""Rows that lie under each other take at most this many times the tokens they have: less makes more
calls, more computes padding.
"""


@dataclass(frozen=True, eq=False)
class Runs:
    """A flat row of tokens is these runs, in order: `counts[i]` rows of `lengths[i]` tokens each.

    A row may go on from `contexts[i]` tokens that lie elsewhere in the flat row, where other rows
    share them.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    keys: Int[Tensor, " S"] | None = None
    """The places of the tokens that each row attends to, row after row: its context, then its own
    tokens. None if there are no contexts.
    """

    @classmethod
    def of_one(cls, length: int) -> Runs:
        """Runs that are one row."""
        return cls((1,), (length,), (0,))

    @property
    def num_tokens(self) -> int:
        return sum(n * t for n, t in zip(self.counts, self.lengths, strict=True))

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """For each run: the number of rows, of tokens in a row, and of tokens in its context."""
        return list(zip(self.counts, self.lengths, self.contexts, strict=True))

    @cached_property
    def under_each_other(self) -> tuple[list[Int[np.ndarray, "R L"]], Int[np.ndarray, " N"]]:
        """Tables of places in the flat row, and the place of each token of the flat row in them.

        A row of a table is a row with its context. Rows are longest first, and filled up on the
        right with their last place. A token's place counts through all tables, read row by row, one
        after the other.
        """
        own = np.repeat(self.lengths, self.counts)
        contexts = np.repeat(self.contexts, self.counts)
        lengths = own + contexts
        places = np.arange(self.num_tokens) if self.keys is None else self.keys.cpu().numpy()
        key_starts = np.cumsum([0, *lengths])[:-1]
        starts = np.cumsum([0, *own])[:-1]
        tables = list[Any]()
        where = np.zeros(self.num_tokens, np.int64)
        base = 0
        for rows in _alike(lengths):
            width = lengths[rows[0]]
            upto = np.minimum(np.arange(width), lengths[rows, None] - 1)
            tables.append(places[key_starts[rows, None] + upto])
            for number, row in enumerate(rows):
                in_tables = base + number * width + np.arange(contexts[row], lengths[row])
                where[starts[row] : starts[row] + own[row]] = in_tables
            base += len(rows) * width
        return tables, where


def _alike(lengths: Int[np.ndarray, " R"]) -> list[list[int]]:
    """Rows by number, longest first, in parts that are not padded by more than `MAX_PADDING`."""
    parts = list[list[int]]()
    total = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        width = int(lengths[parts[-1][0]]) if parts else 0
        total += int(lengths[row])
        if not parts or width * (len(parts[-1]) + 1) > MAX_PADDING * total:
            parts.append([])
            total = int(lengths[row])
        parts[-1].append(row)
    return parts


PACKED_RUNS: Final[ContextVar[Runs | None]] = ContextVar("midflight_runs", default=None)
"""The rows of the micro-batch that this thread computes. They are not handed through the model,
because many architectures do not pass on arguments that they do not know.
"""


@contextmanager
def packed_runs(runs: Runs | None) -> Generator[None]:
    """Meanwhile the model's only row is made of these runs."""
    token = PACKED_RUNS.set(runs)
    try:
        yield
    finally:
        PACKED_RUNS.reset(token)


def ragged_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **unknown: Any,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    """Block-causal attention: a token attends to its own row, up to itself (and at most
    `sliding_window` back, or within its chunk).

    Scores may be capped (`softcap`), and each head may have a sink that draws attention away
    (`s_aux`).
    """
    runs = PACKED_RUNS.get()
    _refuse_unknown(unknown, attention_mask)
    assert runs is not None and runs.num_tokens == query.shape[2], "a micro-batch names its runs"
    chunk = _chunk(module)
    if s_aux is None and chunk is None and _flash_takes(query):
        found = _flash(
            query, key, value, runs, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )
        return found, None
    plain = softcap is None and s_aux is None
    parts: list[Tensor] = []
    queries = query.split([n * t for n, t, _ in runs.shapes], 2)
    for q, k, v, (n, t, context) in zip(
        queries, _attended(key, runs), _attended(value, runs), runs.shapes, strict=True
    ):
        window = _below(sliding_window, context + t)
        piece = _below(chunk, context + t)
        is_causal = not (context or window or piece)
        band: Tensor | None = None
        if not (plain and is_causal):
            band = _band(t, context, window, piece, device=q.device)
        if plain:
            out = nn.functional.scaled_dot_product_attention(
                _rows(q, n, t),
                k,
                v,
                attn_mask=band,
                is_causal=band is None,
                scale=scaling,
                enable_gqa=True,
            )
        else:
            out = _weighed(
                _rows(q, n, t), k, v, band, scaling=scaling, softcap=softcap, sinks=s_aux
            )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None], None


def _flash_takes(query: Tensor) -> bool:
    if flash_varlen is None or not query.is_cuda:
        return False
    return query.dtype in (torch.float16, torch.bfloat16)


def _below(size: int | None, length: int) -> int | None:
    """The size of a window or chunk, if a row of this length is longer; else None."""
    return size if size is not None and length > size else None


def _chunk(module: nn.Module) -> int | None:
    """The tokens of a chunk, if this layer attends within chunks (Llama 4)."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if not kinds or not isinstance(layer, int) or layer >= len(kinds):
        return None
    if kinds[layer] != "chunked_attention":
        return None
    return cast(int, config.attention_chunk_size)


def _weighed(
    query: Float[Tensor, "n H t D"],
    key: Float[Tensor, "n K s D"],
    value: Float[Tensor, "n K s E"],
    band: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "n H t E"]:
    """Attention by weights w_k = exp(s_k) / (sum_j exp(s_j) + exp(sink)), s = c tanh(scale q k /
    c).

    Gemma Team 2024 (2408.00118), section 2; OpenAI 2025 (2508.10925), section 2.2.
    """
    assert band is not None
    heads = query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)) * scale
    if scores.dtype != torch.float64:
        scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~band, -torch.inf)
    if sinks is not None:
        drawn = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, drawn], -1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def _attended(x: Float[Tensor, "1 K N D"], runs: Runs) -> list[Float[Tensor, "n K s D"]]:
    """For each run, the keys or values that its rows attend to."""
    laid = x
    if runs.keys is not None:
        # Whole tokens are selected, not heads: that takes a third of the time.
        tokens = x[0].transpose(0, 1)
        laid = tokens.index_select(0, runs.keys).transpose(0, 1)[None]
    parts = laid.split([n * (context + t) for n, t, context in runs.shapes], 2)
    return [
        _rows(part, n, context + t)
        for part, (n, t, context) in zip(parts, runs.shapes, strict=True)
    ]


def _flash(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    runs: Runs,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Float[Tensor, "1 N H D"]:
    """Block-causal attention by one kernel for all rows. Dao 2023, FlashAttention-2
    (2307.08691).
    """
    assert flash_varlen is not None
    counts = torch.tensor(runs.counts)
    own = torch.tensor(runs.lengths).repeat_interleave(counts)
    attended = own + torch.tensor(runs.contexts).repeat_interleave(counts)
    if runs.keys is not None:
        key = key.index_select(2, runs.keys)
        value = value.index_select(2, runs.keys)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    capped = {} if softcap is None else {"softcap": softcap}
    found = flash_varlen(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _begins(own).to(query.device),
        _begins(attended).to(query.device),
        int(own.max()),
        int(attended.max()),
        softmax_scale=scaling,
        causal=True,
        window_size=window,
        **capped,
    )
    return cast(Tensor, found)[None]


def _begins(lengths: Int[Tensor, " R"]) -> Int[Tensor, " R+1"]:
    """Returns the beginnings of rows of these lengths, and the end of the last one."""
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def attend_raggedly(model: PreTrainedModel) -> None:
    """Makes `model` compute attention by `ragged_attention` from now on; refuses a model that
    cannot.
    """
    AttentionInterface.register(NAME, ragged_attention)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not take another attention function ({error}). "
            "Choose a decoder whose transformers implementation supports attention backends."
        ) from error


def _rows(x: Float[Tensor, "1 H S D"], count: int, length: int) -> Float[Tensor, "n H t D"]:
    return x[0].unflatten(1, (count, length)).transpose(0, 1)


def _band(
    length: int, context: int, window: int | None, chunk: int | None, *, device: torch.device
) -> Tensor:
    """[length, context + length]: True where a token may look."""
    at = torch.arange(context, context + length, device=device)
    upto = torch.arange(context + length, device=device)
    distance = at[:, None] - upto[None, :]
    band = (distance >= 0) & (distance < (window or context + length))
    return band if chunk is None else band & (at[:, None] // chunk == upto[None, :] // chunk)


def _refuse_unknown(options: dict[str, Any], mask: Tensor | None) -> None:
    present = [name for name in UNKNOWN if cast("Any", options.get(name)) is not None]
    if mask is not None:
        present.append("a mask of its own")
    if present:
        raise ConfigError(
            f"the model's attention uses {', '.join(present)}, which packed rows do not compute. "
            "Train it in padded rows, or choose another architecture."
        )
