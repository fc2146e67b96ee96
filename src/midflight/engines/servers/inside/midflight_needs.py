"""Runs inside servers: looks at its import whether the server has what our plugin in it needs beyond its
documented interfaces. A release that lacks a part is refused with one sentence, at its start.

It reads the server's files and imports none of them: some would be too early when plugins are read.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

NEEDS = {
    "vllm": {
        # Documented: backends for weight transfer, and the layerwise reload of checkpoints.
        "vllm.distributed.weight_transfer": ("WeightTransferEngine", "WeightTransferEngineFactory"),
        "vllm.model_executor.model_loader.reload": (
            "initialize_layerwise_reload",
            "finalize_layerwise_reload",
        ),
        # A second model beside the one that is served has loaders of its own.
        "vllm.model_executor.model_loader.reload.layerwise": (
            "LAYERWISE_INFO",
            "get_layerwise_info",
            "_get_original_loader",
        ),
        "vllm.model_executor.model_loader.reload.meta": ("to_meta_tensor",),
        "vllm.model_executor.model_loader.reload.sanitize": ("restore_layer_refs",),
        # On a CPU a tied output head is packed again after a load.
        "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
        # An answer goes on in the middle of a grammar.
        "vllm.v1.structured_output": ("StructuredOutputManager", "_create_grammar"),
        "vllm.v1.structured_output.backend_types": ("StructuredOutputGrammar",),
        # Each piece of an answer says which weights made which token.
        "vllm.v1.engine.output_processor": (
            "RequestState",
            "_new_completion_output",
            "_weight_version_spans",
        ),
    },
    "sglang": {
        # Documented: hooks of plugins, and backends of grammars.
        "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
        "sglang.srt.arg_groups.choices": ("add_grammar_backend_choices",),
        "sglang.srt.constrained.base_grammar_backend": (
            "BaseGrammarObject",
            "register_grammar_backend",
        ),
        "sglang.srt.constrained.llguidance_backend": ("GuidanceBackend", "GuidanceGrammar"),
        # Seeds and adapters on a CPU.
        "sglang.srt.sampling.sampling_batch_info": ("SamplingBatchInfo", "from_schedule_batch"),
        "sglang.srt.layers.sampler": (
            "sampling_from_probs_torch",
            "top_k_top_p_min_p_sampling_from_probs_torch",
            "multinomial_with_seed",
        ),
        "sglang.srt.lora.lora_manager": ("LoRAManager",),
        # Weights that come straight, and the versions of tokens.
        "sglang.srt.managers.scheduler": ("Scheduler", "record_weight_version_change"),
        "sglang.srt.managers.tokenizer_control_mixin": (
            "TokenizerControlMixin",
            "update_weights_from_distributed",
        ),
        "sglang.srt.managers.communicator": ("FanOutCommunicator",),
        "sglang.srt.managers.io_struct": (
            "InitWeightsUpdateGroupReqOutput",
            "UpdateWeightFromDiskReqOutput",
            "UpdateWeightsFromDistributedReqOutput",
        ),
        "sglang.srt.managers.scheduler_components.weight_updater": (
            "SchedulerWeightUpdaterManager",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "update_weights_from_disk",
            "begin_weight_update",
            "_select_runners",
            "record_weight_version_after_update",
            "flush_cache_after_weight_update",
        ),
        "sglang.srt.managers.scheduler_components.internal_state": (
            "SchedulerInternalStateController",
            "get_internal_state",
        ),
        "sglang.srt.model_executor.model_runner_components.weight_updater": (
            "WeightUpdater",
            "get_model",
            "receive_weights_from_distributed",
            "load_weights_from_distributed",
            "begin_weight_update",
            "end_weight_update",
        ),
        "sglang.srt.runtime_context": ("get_serving",),
        "sglang.srt.utils.weight_versions": (
            "WeightVersionEvent",
            "compute_weight_version_spans",
        ),
        "sglang.srt.managers.schedule_batch": ("weight_version_events",),
        # Each piece of an answer says which weights made which token.
        "sglang.srt.managers.scheduler_components.output_streamer": (
            "_GenerationStreamAccumulator",
            "to_payload",
            "output_reqs",
            "completion_tokens",
            "weight_versions",
        ),
    },
}
"""The names that our plugin imports from each module of a server, by server."""


def missing(needs):
    """Yields `module: name` of each part that is not there."""
    for module, names in needs.items():
        text = source_of(module)
        for name in names:
            if not re.search(rf"\b{name}\b", text):
                yield f"{module}: {name}"


def source_of(module):
    """The text of a module's file. It is empty if there is no such module."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        return ""
    if found is None or found.origin is None:
        return ""
    return Path(found.origin).read_text(errors="replace")


def check(server):
    """Raises `ImportError` if the server of this interpreter lacks a part."""
    lacking = list(missing(NEEDS[server]))
    if not lacking:
        return
    try:
        release = version(server)
    except PackageNotFoundError:
        release = "of this interpreter"
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    raise ImportError(
        f"Midflight's plugin in {server} {release} needs {lacking[0]}{more}, which is not there; use "
        "the release of it that docs/engines.md names as tried"
    )


for server in NEEDS:
    if find_spec(server) is not None:
        check(server)
