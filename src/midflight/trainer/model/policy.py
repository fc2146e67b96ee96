"""A causal language model as the trainer uses it: the one place where the trainer meets the
architecture; and what makes a model fit and go fast: ranks that share a step, sharding, lower
precision, and the forwards over a step's predictions, of which each rank makes its share.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from midflight.errors import RunFailed
from midflight.models.proof import forget_lengths
from midflight.models.routing import routers_of
from midflight.trainer.model.attention import Runs, attend_raggedly, laid
from midflight.trainer.model.layers import decoder_layers, unpack_mixers
from midflight.trainer.model.microbatch import (
    Index,
    Layout,
    MicroBatch,
    Predictions,
    num_oversized,
    share_of,
    split,
)
from midflight.trainer.model.plain import PlainDecoder, can_be_plain
from midflight.trainer.model.scores import token_scores
from midflight.types import PackedBatch

Scores = tuple[Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]


class TokenModel(nn.Module):
    """A decoder that gives a number for each prediction of a micro-batch. Its parameters are those
    of `model`, under `model.`
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout = Layout.PACKED, *, by_hand: bool = True
    ) -> None:
        """`by_hand`: plain families are computed without their modules."""
        super().__init__()
        self.layout = layout
        self._plain = (
            PlainDecoder(model)
            if by_hand and layout is Layout.PACKED and can_be_plain(model)
            else None
        )
        if layout is Layout.PACKED:
            attend_raggedly(model)
            unpack_mixers(model)
        # No dropout: the log-probabilities must be those of the distribution that an engine
        # samples.
        model.eval()
        self.model = model

    def forward(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Scores:
        """At each prediction, from the state before its token."""
        raise NotImplementedError

    def _hidden(self, micro: MicroBatch) -> Float[Tensor, "k H"]:
        if self._plain is not None:
            return self._plain.hidden(micro)
        with laid(micro.runs):
            found = self.model.base_model(**self._read(micro))
        hidden: Tensor = found.last_hidden_state.flatten(0, 1)[micro.inputs]
        kind = hidden.device.type
        return (
            hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden
        )

    def _read(self, micro: MicroBatch) -> dict[str, Any]:
        """What the model is told: of packed rows their positions, of others their padding, if there
        is any.
        """
        if self.layout is Layout.EQUAL:
            forget_lengths(self.model)
        told = {"position_ids": micro.position_ids, "attention_mask": micro.attention_mask}
        return {
            "input_ids": micro.input_ids,
            "use_cache": False,
            **{name: value for name, value in told.items() if value is not None},
        }


class Policy(TokenModel):
    """Gives the log-probability of tokens instead of logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout = Layout.PACKED,
        *,
        replays: bool = False,
        by_hand: bool = True,
    ) -> None:
        """`replays`: of a mixture, tokens go to the experts that an engine recorded."""
        routers = routers_of(model) if replays else None
        super().__init__(model, layout, by_hand=by_hand)
        self._has_plain_head = has_plain_head(model)
        self.routers = routers

    def forward(
        self, micro: MicroBatch, *, temperature: float, with_entropy: bool = False
    ) -> Scores:
        """log softmax(logits / temperature) of each target, in float32 (float64 for a float64
        model), and the entropy in nats if asked.

        With the temperature of sampling and no truncation this is the distribution an engine
        samples from. Logits are made where a prediction is wanted and nowhere else, a few at a
        time; an architecture that does more to them than a linear layer makes all.
        """
        layer = self.model.get_output_embeddings()
        if self.routers is not None:
            self.routers.replay(micro.experts, device=micro.input_ids.device)
        if self._has_plain_head:
            hidden = self._hidden(micro)
            weight = cast(nn.Linear, layer).weight
            bias = cast("Tensor | None", cast(nn.Linear, layer).bias)
            return token_scores(
                hidden,
                weight.to(hidden.dtype),
                bias,
                micro.targets,
                temperature=temperature,
                with_entropy=with_entropy,
                kept=micro.kept,
            )
        logits = self._logits(micro)
        z = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        z = z if micro.kept is None else micro.kept.cut(z)
        table = z.log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1) if with_entropy else None
        return table.gather(-1, micro.targets[:, None]).squeeze(-1), entropy

    def _logits(self, micro: MicroBatch) -> Float[Tensor, "k V"]:
        if micro.runs is None:  # rows keep different predictions, so all logits are made
            return self.model(**self._read(micro)).logits.flatten(0, 1)[micro.inputs]
        with laid(micro.runs):
            return self.model(**self._read(micro), logits_to_keep=micro.inputs).logits[0]


def check_fits(batch: PackedBatch, model: PreTrainedModel) -> None:
    """`RunFailed` if the batch holds tokens or positions that the model has not got: it was sampled
    from another model.
    """
    size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    unknown = batch.token_ids[(batch.token_ids < 0) | (batch.token_ids >= size)]
    if len(unknown):
        raise RunFailed(
            f"the batch holds token {unknown[0]}, and the model's vocabulary ends at {size - 1}. "
            "Sample and train with one model and tokenizer."
        )
    longest = int(np.diff(batch.row_offsets).max(initial=0))
    context = _longest_context(model)
    if context is not None and longest > context:
        raise RunFailed(
            f"the batch holds a row of {longest} tokens, and the model's context is {context}. "
            "Lower the environment's lengths, or the engine's context."
        )


def _longest_context(model: PreTrainedModel) -> int | None:
    """The most tokens that the configuration can be read to allow; None if it has no such number.

    Some configurations count the stretch of rotary positions in, some do not.
    """
    config: Any = model.config.get_text_config()
    context: int | None = getattr(config, "max_position_embeddings", None)
    stretch = (getattr(config, "rope_parameters", None) or {}).get("factor") or 1
    return None if context is None else int(context * max(1, stretch))


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are one linear layer on the last hidden states, nothing scaled or capped after
    it: tried out on three tokens.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or model.base_model is model:
        return False
    device = layer.weight.device
    ids = torch.tensor([[1, 2, 3]], device=device)
    with laid(Runs.of_one(3)):
        hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    if hidden.shape[-1] != layer.in_features:
        return False
    return torch.allclose(
        nn.functional.linear(hidden, layer.weight, layer.bias), logits, rtol=1e-3, atol=1e-5
    )


# --- Ranks ----------------------------------------------------------------------------------------


SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface: `struct ifreq` in and out, in it the address from
byte 20 on.
"""
PATIENCE = timedelta(days=7)
"""A rank may wait this long for another, which may be at its warm start. A death is noticed at
once, by its connection.
"""


def backend_of(device: str) -> str:
    """How ranks talk that compute there: what lies on a GPU goes by NCCL, and what stays on the CPU
    by gloo, through the same calls.
    """
    return (
        "gloo"
        if torch.device(device).type == "cpu"
        else f"cpu:gloo,{torch.device(device).type}:nccl"
    )


def join(
    meeting: str,
    *,
    host: str,
    rank: int,
    size: int,
    device: str = "cpu",
    listening_fd: int | None = None,
) -> None:
    """Makes this process one of `size`, on any machines. Waits until all have come.

    They meet at `meeting`, `host:port` of the first one, which brings the listening socket; it
    listens there only. `host` is where this one is reached by the others: gloo takes that address's
    interface, unless `GLOO_SOCKET_IFNAME` names one. Nothing is encrypted.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # 0 where it sees its own alone
    # else gloo takes the address that this machine's name leads to
    if (interface := interface_of(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    at, _, port = meeting.rpartition(":")
    is_first = rank == 0
    store = TCPStore(
        at.strip("[]"),
        int(port),
        is_master=is_first,
        timeout=PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listening_fd,
    )
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=size, timeout=PATIENCE
    )


def interface_of(host: str) -> str | None:
    """Name of this machine's network interface that has the address; None where there is none, or
    the system does not tell (Linux does).
    """
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
    if sys.platform != "linux":
        return None
    packed = socket.inet_pton(family, str(address))
    if family == socket.AF_INET6:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(packed.hex())), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking, SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if answer[20:24] == packed:
                    return name
    return None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those that train together. Every method is a collective: all ranks
    call it, in the same order.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """This process's place in torch's default process group; a single rank where there is
        none.
        """
        return (
            cls(dist.get_rank(), dist.get_world_size())
            if dist.is_available() and dist.is_initialized()
            else cls()
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sums in place over the ranks, and returns it. Arrays that each rank filled in part, and
        left 0 elsewhere, become whole.
        """
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


def shard(reader: TokenModel, ranks: Ranks, *, compute_dtype: torch.dtype | None) -> None:
    """FSDP2 (Zhao et al. 2023, 2304.11277): each rank keeps its share of every parameter, and
    gathers a layer when it is used.

    Gradients are summed over the ranks in full precision, not averaged: each rank has its share of
    one loss.
    """
    if ranks.size == 1:
        return
    device = next(reader.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=next(reader.parameters()).dtype if compute_dtype else None,
    )
    for layer in decoder_layers(reader.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(reader, mesh=mesh, mp_policy=precision)
    for module in _sharded(reader):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def forget_gathered(reader: TokenModel) -> None:
    """After a forward without a backward: the outermost weights are still gathered, and
    `parameters()` are those, not this rank's shares.
    """
    if isinstance(reader, FSDPModule):
        for module in _sharded(reader):
            module.reshard()


def precision(reader: TokenModel, compute_dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The forward's precision beside weights of a higher one. A sharded model has its own way
    (`shard`).
    """
    if compute_dtype is None or isinstance(reader, FSDPModule):
        return nullcontext()
    return torch.autocast(next(reader.parameters()).device.type, dtype=compute_dtype)


def _sharded(reader: TokenModel) -> Iterator[FSDPModule]:
    return (module for module in reader.modules() if isinstance(module, FSDPModule))


Forward = tuple[MicroBatch, bool, Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]


class Passes:
    """Runs a reader over predictions. Collective: all ranks call with the same predictions, and
    take as many forwards.
    """

    def __init__(
        self,
        reader: TokenModel,
        ranks: Ranks,
        *,
        budget: int,
        temperature: float,
        compute_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """`budget`: tokens of a micro-batch."""
        self.reader = reader
        self._ranks = ranks
        self.budget = budget
        self._temperature = temperature
        self._device = device
        self._compute_dtype = compute_dtype

    def forwards(
        self, predictions: Predictions, chosen: Index, *, trains: bool, with_entropy: bool = False
    ) -> Iterator[Forward]:
        """This rank's micro-batches of the `chosen` predictions (ascending): each with its
        log-probabilities (of a critic values), and entropies if asked.

        Gathering layers takes all ranks, so one that has fewer micro-batches than another does some
        for nothing, marked as not its own.
        """
        mine = share_of(predictions, chosen, rank=self._ranks.rank, size=self._ranks.size)
        micros = list(
            split(
                predictions,
                mine,
                budget=self.budget,
                device=self._device,
                layout=self.reader.layout,
            )
        )
        own = len(micros)
        count = self._ranks.largest(len(micros))
        if count > own:
            idle = next(
                split(
                    predictions,
                    chosen[:1],
                    budget=self.budget,
                    device=self._device,
                    layout=self.reader.layout,
                )
            )
            micros += [idle] * (count - own)
        for number, micro in enumerate(micros):
            with torch.set_grad_enabled(trains), precision(self.reader, self._compute_dtype):
                logprobs, entropy = self.reader(
                    micro, temperature=self._temperature, with_entropy=with_entropy
                )
            yield micro, number < own, logprobs, entropy
        if not trains:  # a backward does it by itself
            forget_gathered(self.reader)

    def scores(self, predictions: Predictions, chosen: Index | None = None) -> Float[Tensor, " K"]:
        """Log-probabilities (of a critic values) of the chosen predictions, or of all, without
        gradient; whole on every rank, 0 where not chosen.
        """
        found = torch.zeros(len(predictions.targets), dtype=torch.float64, device=self._device)
        everything = np.arange(len(predictions.targets)) if chosen is None else chosen
        dtype = torch.float32
        for micro, is_mine, logprobs, _ in self.forwards(predictions, everything, trains=False):
            dtype = logprobs.dtype
            if is_mine:
                found[micro.predictions] = logprobs.double()
        return self._ranks.sum(found).to(dtype)

    def num_oversized(self, predictions: Predictions) -> int:
        return num_oversized(predictions, budget=self.budget)
