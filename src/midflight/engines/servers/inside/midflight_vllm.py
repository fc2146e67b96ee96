"""Runs inside vLLM's workers: makes the weights of a model folder live. It is loaded by
`--worker-extension-cls midflight_vllm.Loader`.

vLLM's interpreter has no Midflight, so this file imports only packages that are there. It is called
between two steps, in a pause, by `POST /collective_rpc`.

If vLLM was started with `--weight-transfer-config '{"backend": "midflight"}'`, it also takes
weights that come straight from the trainer, by vLLM's own routes. `/init_weight_transfer_engine`
begins to receive while vLLM generates, and `/update_weights` in a pause only swaps.

If it was started with another backend, vLLM's own engine receives, and the loader adds what that
lacks: it keeps the weights that are served, and says the digests of what has arrived. Where the GPU
has room, vLLM's engine loads a model beside the served one while vLLM generates.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import midflight_needs  # noqa: F401 (it checks what vLLM must have, before that is imported)
import torch
from midflight_direct import (
    NOTHING_ORDERED,
    DoubleBuffer,
    LoadedInPlace,
    OwnUpdate,
    beside,
    can_stand_beside,
    device_of,
    exchange,
    in_host_memory,
)
from midflight_seed import mixed
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


class Loader:
    """A mixin of the worker class."""

    def midflight_ready(self) -> bool:
        """Answers true when the server is attached. A server that was started without this file
        cannot answer.
        """
        return True

    def midflight_grammars(self) -> bool:
        """True if answers can go on in the middle of a grammar. That needs the plugin beside this
        file, and llguidance as the maker of vLLM's masks.
        """
        if "midflight_in_vllm" not in sys.modules:
            return False
        return self.vllm_config.structured_outputs_config.backend == "guidance"

    def midflight_seeds(self) -> bool:
        """Makes the noise of requests with a seed a function of seed and position, so that it is
        the same after a resume. Returns True if it is.

        vLLM's newer runners do so themselves. The older one draws from a generator for each
        request, which would begin anew with each attempt. On a CPU it cannot wind the generator
        back, and dies when it takes a seeded prompt in pieces.
        """
        runner = self.model_runner
        if type(runner).__module__ in NEWER_RUNNERS:
            return True
        if not all(hasattr(runner, name) for name in OLDER_RUNNER):
            return False
        if not hasattr(runner, "midflight_sample"):
            runner.midflight_sample = runner._sample
            runner._sample = partial(_sample_seeded, runner, {})
        return True

    def midflight_load(self, folder: str) -> int:
        """Makes the tensors of the folder, by checkpoint name, the model's weights. Returns how
        many it read. vLLM fuses and casts them.

        It goes layer by layer, because plain `load_weights` fails half way on a CPU, where layers
        have packed their weights and let them go.
        """
        names: list[str] = []
        with ExitStack() as opened:
            # All of them before anything is changed: vLLM does not survive a load that fails half way.
            paths = sorted(Path(folder).glob("*.safetensors"))
            files = [opened.enter_context(safe_open(path, "pt")) for path in paths]
            if isinstance(self.weight_transfer_engine, DirectTransfer):
                self.weight_transfer_engine.forget_live()
            elif hasattr(self, "midflight_own_update"):
                _forget_notes(self.midflight_own_update.beside)
                self.midflight_own_update.forget()
            tensors = _tensors(files, names)
            _reload(self.model_runner.get_model(), self.model_runner.model_config, tensors)
        return len(names)

    def midflight_landed(self) -> dict[str, object] | None:
        """The state of the weights that came straight from the trainer to this worker. `None` if
        vLLM was started without an engine for them.
        """
        engine = self.weight_transfer_engine
        if engine is None:
            return None
        if isinstance(engine, DirectTransfer):
            return engine.double_buffer.state()
        state = {**NOTHING_ORDERED, **self._midflight_update().state()}
        if not hasattr(engine, "set_weight_update_target"):
            state["stages"] = False  # this release can load in the pause only
        return state

    def midflight_let_go(self) -> None:
        """Gives back the memory of the weights that came straight and are not served."""
        if isinstance(self.weight_transfer_engine, DirectTransfer):
            self.weight_transfer_engine.double_buffer.let_go()

    def midflight_keep(self, label: str) -> None:
        """Keeps the weights that are served, before vLLM's own engine brings others."""
        update = self._midflight_update()
        _forget_notes(update.beside)
        update.begin(label)

    def midflight_stage(self, served: str) -> None:
        """Makes vLLM's own engine load its next update into a model beside the served one. `served`
        is the label that vLLM gives to its weights.
        """
        update = self._midflight_update()
        _forget_notes(update.beside)
        update.clear(served)
        model = self.model_runner.get_model()
        other = _beside(model)
        load = partial(type(model).load_weights, other)
        other.load_weights = partial(_load_and_note, load, update)
        update.stage(other)
        engine = self.weight_transfer_engine
        engine.set_weight_update_target(other, engine.model_config)

    def midflight_swap(self, served: str) -> None:
        """Serves the update that came beside. `served` is the label of the weights that are kept
        for it.
        """
        update = self._midflight_update()
        update.swap(served)
        _forget_notes(update.beside)

    def midflight_take_back(self, label: str, served: str) -> None:
        """Serves the weights that were kept, also after an update that broke off. `served` is the
        label that vLLM gives to its weights.
        """
        self._midflight_update().take_back(label, served)
        for module in self.model_runner.get_model().modules():
            get_layerwise_info(module).reset()

    def _midflight_update(self) -> OwnUpdate:
        """Returns the watch of vLLM's own updates, and makes it at the first call: from then on the
        model tells it of all weights that it loads.
        """
        model = self.model_runner.get_model()
        if not hasattr(self, "midflight_own_update"):
            self.midflight_own_update = OwnUpdate(model)
            load = model.load_weights
            model.load_weights = partial(_load_and_note, load, self.midflight_own_update)
        return self.midflight_own_update


def _load_and_note(load, update: OwnUpdate, weights: Iterable[tuple[str, Tensor]]):
    """Loads a bucket and hashes it. Weights that come one by one, from a folder, are not hashed."""
    if isinstance(weights, list):
        update.arrive(weights)
    return load(weights)


NEWER_RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.cpu.model_runner")
"""The modules of runners whose noise is a function of seed and position."""
OLDER_RUNNER = ("_sample", "input_batch", "requests", "discard_request_mask")
"""The attributes that the older runner must have, so that its noise can be made such a function."""


def _reload(model: nn.Module, model_config: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    device = next(model.parameters()).device
    if device.type == "cpu":
        _forget_packed_experts(model)
    # The context makes every operation slower, so it is entered only if it changes something.
    with nullcontext() if device.type == "cpu" else torch.device(device):
        initialize_layerwise_reload(model)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, model_config)
    _repack_heads(model)


@dataclass
class OrderBody:
    """The body of `/init_weight_transfer_engine`."""

    order: dict


@dataclass
class TakeBody:
    """The body of `/update_weights`."""

    version: int


class DirectTransfer(WeightTransferEngine):
    """vLLM's end of the direct way for weights. A version is received in the background, and an
    update swaps it in.
    """

    init_info_cls = OrderBody
    update_info_cls = TakeBody

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.double_buffer = DoubleBuffer(self._prepared, self._swapped, device_of(model))
        self._in_place = LoadedInPlace(partial(_reload, model, self.model_config))

    def init_transfer_engine(self, init_info: OrderBody) -> None:
        parallel = self.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.double_buffer.begin(
            init_info.order, index=index, workers=parallel.world_size_across_dp
        )

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict) -> None:
        """Takes the place of vLLM's own method, which in the end waits for an accelerator and fails
        if there is none.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TakeBody) -> None:
        self.double_buffer.take(update_info.version)

    def finish_weight_update(self) -> None:
        pass

    def forget_live(self) -> None:
        """Says that other weights are loaded: none that came straight are served from now on."""
        self.double_buffer.forget_live()
        self._in_place.forget()

    def shutdown(self) -> None:
        pass

    def _prepared(self, tensors: Iterator[tuple[str, Tensor]]):
        if not can_stand_beside(self.model):
            return in_host_memory(tensors)
        ready = _beside(self.model)
        try:
            _reload(ready, self.model_config, tensors)
        finally:
            _forget_notes(ready)
        return ready

    def _swapped(self, ready):
        if isinstance(ready, nn.Module):
            self._in_place.forget()
            return exchange(self.model, ready)
        return self._in_place.swap(ready)


WeightTransferEngineFactory.register_engine("midflight", DirectTransfer)


def _beside(model: nn.Module) -> nn.Module:
    """A model beside the served one, which vLLM can load as that."""
    ready = beside(model)
    for served, other in zip(model.modules(), ready.modules(), strict=True):
        known = get_layerwise_info(served)
        new = get_layerwise_info(other)
        new.restore_device = known.restore_device
        metadata = []
        for kind in known.restore_metadata:
            metadata.append({name: _unloaded(t, served) for name, t in kind.items()})
        new.restore_metadata = tuple(metadata)
    return ready


def _forget_notes(model: nn.Module | None) -> None:
    """Drops vLLM's notes of a model beside the served one, because they hold its layers."""
    if model is None:
        return
    for layer in model.modules():
        if layer in LAYERWISE_INFO:
            LAYERWISE_INFO.pop(layer).restore_metadata = ({}, {})


def _unloaded(tensor: Tensor, served: nn.Module) -> Tensor:
    """A tensor's form before it is loaded, for a layer beside the `served` one. It keeps the
    loaders of `served`, so that exchanged tensors keep nothing alive. After a first reload the form
    of `served` has a loader that loads tensors of `served` only, and drops all others silently.
    """
    form = restore_layer_refs(to_meta_tensor(tensor), served)
    form.weight_loader = _get_original_loader(form)
    return form


def _sample_seeded(runner, left_out: dict[str, torch.Generator], *args):
    """Takes the place of the runner's `_sample`. `left_out` holds by id the generators of requests
    whose prompts are not read to their end. Samples of such requests are discarded, and their
    generator would be wound back.
    """
    batch = runner.input_batch
    for request_id in list(left_out):
        generator = left_out.pop(request_id)
        row = batch.req_id_to_index.get(request_id)
        if row is not None:
            batch.generators[row] = generator
        elif request_id in runner.requests:
            left_out[request_id] = generator
    for row, generator in list(batch.generators.items()):
        request_id = batch.req_ids[row]
        if runner.discard_request_mask.np[row]:
            left_out[request_id] = batch.generators.pop(row)
        else:
            seed = runner.requests[request_id].sampling_params.seed
            position = int(batch.num_tokens_no_spec[row])
            generator.manual_seed(mixed(seed, position))
    return runner.midflight_sample(*args)


def _tensors(files: Iterable[safe_open], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            names.append(name)
            yield name, file.get_tensor(name)


def _forget_packed_experts(model: nn.Module) -> None:
    """Drops the kernels of experts, so that they are made again. On a CPU experts compute with
    packed weights too. These are packed when the kernel is made, and an existing kernel would read
    the new weights as if they were packed.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_heads(model: nn.Module) -> None:
    """Packs the weights of output heads again. On a CPU a linear layer computes with a packed copy
    of its weight, made when the layer is loaded. An output head that is tied to the embedding is
    not loaded by itself, so its copy would stay the old one.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
