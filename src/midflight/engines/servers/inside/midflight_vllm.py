"""Runs inside vLLM's workers: makes the weights of a model folder live. Loaded by `--worker-extension-cls midflight_vllm.Loader`.

vLLM's interpreter has no Midflight: this file imports only what is there. It is called between two steps, in a pause, by
`POST /collective_rpc`.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from midflight_seed import mixed
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Loader:
    """Mixed into the worker class."""

    def midflight_ready(self) -> bool:
        """Asked when the server is attached: one that was started without us cannot answer."""
        return True

    def midflight_grammars(self) -> bool:
        """Whether answers can go on in the middle of a grammar: the plugin beside this file is there, and vLLM's masks are llguidance's."""
        return "midflight_in_vllm" in sys.modules and self.vllm_config.structured_outputs_config.backend == "guidance"

    def midflight_seeds(self) -> bool:
        """Makes the noise of requests with a seed a function of seed and position, so that it is the same after a resume; says whether it is.

        vLLM's newer runner does so itself. The older one draws from a generator for each request, which would begin anew with each
        attempt, and which on a CPU it cannot wind back: it dies when it takes a seeded prompt in pieces.
        """
        runner = self.model_runner
        if type(runner).__module__ in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.cpu.model_runner"):
            return True
        if not all(hasattr(runner, name) for name in ("_sample", "input_batch", "requests", "discard_request_mask")):
            return False
        if not hasattr(runner, "midflight_sample"):
            runner.midflight_sample = runner._sample
            runner._sample = partial(_sample_seeded, runner, {})
        return True

    def midflight_load(self, folder: str) -> int:
        """Makes the tensors of the folder, by checkpoint name, the model's weights; says how many it read. vLLM fuses and casts them.

        Layer by layer, because plain `load_weights` fails half way on a CPU, where layers have packed their weights and let them go.
        """
        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        names: list[str] = []
        if device.type == "cpu":
            _forget_packed_experts(model)
        # The context makes every operation slower, so it is there only where it says something new.
        with nullcontext() if device.type == "cpu" else torch.device(device):
            initialize_layerwise_reload(model)
            model.load_weights(_tensors(Path(folder), names))
            finalize_layerwise_reload(model, self.model_runner.model_config)
        _repack_heads(model)
        return len(names)


def _sample_seeded(runner, left_out: dict[str, torch.Generator], *args):
    """Takes the place of the runner's `_sample`. `left_out`: generators of requests whose prompts are not read to their end, by id. Their
    samples are discarded, and the generator would be wound back."""
    batch = runner.input_batch
    for request_id in list(left_out):
        generator, row = left_out.pop(request_id), batch.req_id_to_index.get(request_id)
        if row is not None:
            batch.generators[row] = generator
        elif request_id in runner.requests:
            left_out[request_id] = generator
    for row, generator in list(batch.generators.items()):
        request_id = batch.req_ids[row]
        if runner.discard_request_mask.np[row]:
            left_out[request_id] = batch.generators.pop(row)
        else:
            generator.manual_seed(mixed(runner.requests[request_id].sampling_params.seed, int(batch.num_tokens_no_spec[row])))
    return runner.midflight_sample(*args)


def _tensors(folder: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                names.append(name)
                yield name, file.get_tensor(name)


def _forget_packed_experts(model: nn.Module) -> None:
    """On a CPU experts compute with packed weights too. They are packed where their kernel is made, and a kernel that is there already
    would read the new weights as if they were packed."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_heads(model: nn.Module) -> None:
    """On a CPU a linear layer computes with a packed copy of its weight, made when the layer is loaded. An output head that is tied
    to the embedding is not loaded by itself, so its copy would stay the old one."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
