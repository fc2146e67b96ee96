"""Runs inside SGLang, in each of its processes: a plugin with a backend of grammars,
`--grammar-backend midflight`.

SGLang finds it by the entry point beside it. The backend takes an answer's grammar from any token
of the answer on.

On a CPU requests may also have seeds and adapters. SGLang by itself heeds seeds only with kernels
for GPUs.

The plugin also takes weights that come straight from the trainer. `/init_weights_update_group` for
a group of our name begins to receive while SGLang generates, `/server_info` lists the versions that
each worker holds, and `/update_weights_from_distributed` swaps it in between two steps, in a pause
or not.

Each piece of an answer says which weights made which token.

Where SGLang's own engine brings a version, in groups of any other name, the plugin adds what SGLang
lacks. `/server_info` lists the digests of what has arrived. Where the GPU has room, updates in
groups of our name make a model beside the served one, give it to SGLang's engine bucket by bucket
while SGLang generates, and exchange the two. Otherwise `/begin_weight_update` keeps the weights that
are served. One more such update takes them back.
"""

import json
from dataclasses import replace

import midflight_needs  # noqa: F401 (it checks what SGLang must have, before that is imported)
import torch
from llguidance.torch import fill_next_token_bitmask
from midflight_direct import (
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
from midflight_shape import Shapes
from sglang.srt.arg_groups.choices import add_grammar_backend_choices
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, register_grammar_backend
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class SglangShape(BaseGrammarObject):
    """A `Shape` in SGLang's words."""

    move_vocab_mask = staticmethod(GuidanceGrammar.move_vocab_mask)
    apply_vocab_mask = staticmethod(GuidanceGrammar.apply_vocab_mask)
    reset_vocab_mask = staticmethod(GuidanceGrammar.reset_vocab_mask)

    def __init__(self, shape, tokenizer):
        super().__init__()
        self._shape = shape
        self.llguidance_tokenizer = tokenizer

    allocate_vocab_mask = GuidanceGrammar.allocate_vocab_mask

    def accept_token(self, token):
        if not self._shape.accept([token]):
            raise ValueError(f"the grammar forbids token {token}")

    def rollback(self, k):
        self._shape.back(k)

    def is_terminated(self):
        return self._shape.ended

    def fill_vocab_mask(self, vocab_mask, idx):
        self._shape.fill(
            vocab_mask[idx], lambda matcher: fill_next_token_bitmask(matcher, vocab_mask, idx)
        )

    def try_jump_forward(self, tokenizer):
        return None


class ShapeBackend(GuidanceBackend):
    """A backend whose `ebnf` is the text that `Shapes` reads. No two requests share one, so nothing
    is put into SGLang's cache.
    """

    def __init__(self, server_args, tokenizer, vocab_size, eos_token_ids):
        super().__init__(tokenizer, n_vocab=vocab_size, eos_token_ids=eos_token_ids)
        self._shapes = Shapes(tokenizer, self.llguidance_tokenizer.vocab_size)

    def dispatch_ebnf(self, key_string):
        return SglangShape(self._shapes.shape(key_string), self.llguidance_tokenizer)

    def set_cache(self, key, value):
        pass


_NO_SEED = -1
_generator = torch.Generator()


def _with_seeds(info, cls, batch, vocab_size):
    """Gives a batch that has just been made a place for the seeds of its requests. It does so even
    if no request has one, because batches are merged row by row.
    """
    if torch.device(batch.device).type == "cpu" and info.sampling_seed is None:
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def _seed_of(request):
    seed = request.sampling_params.sampling_seed
    return _NO_SEED if seed is None else seed


def _given(seeds):
    """The seeds. `None` if no request has one, so that SGLang samples as it always does."""
    if seeds is None:
        return None
    if seeds.device.type == "cpu" and (seeds < 0).all():
        return None
    return seeds


def _sample(sample, probs, sampling_seed=None, positions=None):
    return sample(probs, _given(sampling_seed), positions)


def _sample_truncated(
    sample, probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **rest
):
    """Samples in place of SGLang, which dies if seeds and min-p meet in a batch. SGLang's noise
    would also belong to ranks and not to ids here: a request without truncation would get other
    tokens if a request with truncation is beside it.
    """
    seeds = _given(sampling_seed)
    if seeds is None or seeds.device.type != "cpu":
        return sample(probs, top_ks, top_ps, min_ps, need_min_p_sampling, seeds, positions, **rest)
    ordered, ids = probs.sort(dim=-1, descending=True)
    out = torch.arange(probs.shape[-1]) >= top_ks[:, None]
    out |= ordered.cumsum(-1) - ordered > top_ps[:, None]
    out |= ordered < ordered[:, :1] * min_ps[:, None]
    kept = torch.zeros_like(probs).scatter_(-1, ids, ordered.masked_fill(out, 0.0))
    return _draw(None, kept.log(), seeds, positions).view(-1).to(torch.int32)


def _draw(draw, logprobs, seed, positions):
    """Ids [R, 1], by Gumbel-max. SGLang's own noise wants a GPU."""
    if logprobs.device.type != "cpu":
        return draw(logprobs, seed, positions)
    noise = torch.empty_like(logprobs, dtype=torch.float32).exponential_()
    for row, asked, position in zip(noise, seed.tolist(), positions.tolist(), strict=True):
        if asked != _NO_SEED:
            row.exponential_(generator=_generator.manual_seed(mixed(asked, position)))
    noise = noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()
    return (logprobs - noise).argmax(-1, keepdim=True)


GROUP = "midflight:"
"""The beginning of the name of a group that is ours. An order follows it, as JSON."""
STAGE = "midflight:stage"
"""The name by which an update of SGLang's own begins beside the served weights."""
BESIDE = "midflight:beside:"
"""The beginning of the name of the group by which its buckets come. SGLang's own name follows it."""
SWAP = "midflight:swap"
"""The name by which it is served."""
OWN = "midflight:own"
"""The name by which an update of SGLang's own is taken back."""
LET_GO = "midflight:let_go"
"""The name by which the memory of weights that are not served is given back."""
_buffers = []
"""One `DoubleBuffer`, from its first use on: a process has one manager of weights."""
_updates = []
"""One `OwnUpdate`, in the same way."""


def _buffer(manager):
    if not _buffers:
        runner = manager.tp_worker.model_runner
        in_place = LoadedInPlace(lambda tensors: _load(runner, tensors))
        buffer = DoubleBuffer(
            lambda tensors: _prepared(runner.model, tensors),
            lambda ready: _swapped(runner, in_place, ready),
            device_of(runner.model),
        )
        _buffers.append(buffer)
    return _buffers[0]


def _update(manager):
    if not _updates:
        _updates.append(OwnUpdate(manager.tp_worker.model_runner.model))
    return _updates[0]


def _begin_own(original, manager, asked):
    """Keeps what is served before SGLang opens its model for other weights."""
    from sglang.srt.runtime_context import get_serving

    if _update(manager).can_keep:
        _buffer(manager).forget()
        _update(manager).begin(get_serving().weight_version)
    return original(manager, asked)


def _load_and_note(original, updater, weights):
    """Loads a bucket and hashes it. A bucket that could not be loaded has no digest: SGLang answers
    for its first worker only. An update without a tensor only labels the weights.
    """
    success, message = original(updater, weights)
    for update in _updates:
        if success and weights and update.loads(updater.get_model()):
            update.arrive(weights)
    return success, message


def _loaded(original, manager, asked):
    """Weights come from a folder. If a file cannot be loaded, SGLang by itself reads the same folder
    again to go back, and ends. Here it says that it failed, and is given the weights before.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    try:
        said = original(manager, asked)
        failure = "" if said.success else said.message
    except Exception as error:
        failure = f"loading {asked.model_path}: {error}"
    _update(manager).forget()
    failure = next(filter(None, _each(manager, failure)), "")
    if failure:
        return UpdateWeightFromDiskReqOutput(success=False, message=failure)
    return said


def _prepared(model, tensors):
    if not can_stand_beside(model):
        return in_host_memory(tensors)
    ready = beside(model)
    ready.load_weights(tensors)
    return ready


def _swapped(runner, in_place, ready):
    if isinstance(ready, list):
        return in_place.swap(ready)
    in_place.forget()
    return exchange(runner.model, ready)


def _load(runner, tensors):
    runner.weight_updater.begin_weight_update()
    runner.model.load_weights(tensors)
    runner.weight_updater.end_weight_update(run_post_load=False)


def _each(manager, value):
    """The value of each worker, in their order. All workers heed requests in the same order, so all
    of them come here.
    """
    count = torch.distributed.get_world_size(group=manager.tp_cpu_group)
    said = [value] * count
    if count > 1:
        torch.distributed.all_gather_object(said, value, group=manager.tp_cpu_group)
    return said


def _begin(original, manager, asked):
    if not asked.group_name.startswith(GROUP):
        return original(manager, asked)
    from sglang.srt.managers import io_struct  # too early when plugins are read

    try:
        group = manager.tp_cpu_group
        index = torch.distributed.get_rank(group=group)
        count = torch.distributed.get_world_size(group=group)
        buffer = _buffer(manager)
        order = json.loads(asked.group_name.removeprefix(GROUP))
        buffer.begin(order, index=index, workers=count)
    except ValueError as error:
        return io_struct.InitWeightsUpdateGroupReqOutput(success=False, message=str(error))
    return io_struct.InitWeightsUpdateGroupReqOutput(success=True, message="receiving")


def _take(original, manager, asked):
    """Swaps the version in, in all workers or in none."""
    if not asked.group_name.startswith(GROUP):
        return original(manager, asked)
    from sglang.srt.managers import io_struct

    success = True
    message = "done"
    if asked.group_name == LET_GO:
        _buffer(manager).let_go()
    elif asked.group_name == STAGE:
        _stage(manager)
    elif asked.group_name.startswith(BESIDE):
        success, message = _load_beside(manager, asked)
    else:
        success, message = _serve(manager, asked)
    return io_struct.UpdateWeightsFromDistributedReqOutput(success=success, message=message)


def _serve(manager, asked):
    if asked.group_name == SWAP:
        failure = _swapped_own(manager)
    elif asked.group_name == OWN:
        failure = _taken_back(manager, asked.weight_version)
    else:
        failure = _swapped_in(manager, int(asked.weight_version))
    if failure:
        return False, failure
    manager.record_weight_version_after_update(asked.weight_version)
    return manager.flush_cache_after_weight_update(asked, True, "swapped")


def _stage(manager):
    from sglang.srt.runtime_context import get_serving

    _buffer(manager).forget()
    update = _update(manager)
    update.clear(get_serving().weight_version)
    update.stage(beside(manager.tp_worker.model_runner.model))


def _load_beside(manager, asked):
    """Lets SGLang's own engine receive a bucket and load it into the model beside the served one. The
    step that is under way ends before, because two groups of NCCL at once can wait for each other.
    """
    update = _update(manager)
    updater = replace(
        manager.tp_worker.model_runner.weight_updater, get_model=lambda: update.beside
    )
    device = torch.device(updater.device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    try:
        weights = updater.receive_weights_from_distributed(
            names=asked.names,
            dtypes=asked.dtypes,
            shapes=asked.shapes,
            group_name=asked.group_name.removeprefix(BESIDE),
            load_format=asked.load_format,
        )
    except Exception as error:
        return False, f"receiving a bucket: {error}"
    return updater.load_weights_from_distributed(weights)


def _swapped_own(manager):
    """Serves the update that has come beside, in each worker that can. Returns why a worker cannot,
    or nothing. The others then take it back.
    """
    from sglang.srt.runtime_context import get_serving

    failure = ""
    try:
        _update(manager).swap(get_serving().weight_version)
    except (ValueError, RuntimeError) as error:
        failure = str(error)
    return next(filter(None, _each(manager, failure)), "")


def _swapped_in(manager, version):
    """Serves a version that our plugin has received. Returns why it cannot, or nothing."""
    buffer = _buffer(manager)
    if not all(_each(manager, buffer.holds(version))):
        return f"version {version} is not with every worker"
    _update(manager).forget()
    buffer.take(version)
    return ""


def _taken_back(manager, label):
    from sglang.srt.runtime_context import get_serving

    update = _update(manager)
    served = get_serving().weight_version
    if not all(_each(manager, label in (update.kept, served))):
        return f"version {label} is not with every worker"
    update.take_back(label, served)
    return ""


def _changed(original, scheduler, new_version):
    """SGLang notes how many tokens each request has when the weights change. A request in a step
    under way gets one more token of the old weights. A request that waits while that step reads
    other prompts does not.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old_version = get_serving().weight_version
    if new_version not in (None, old_version):
        for req in _under_way(scheduler):
            req.weight_version_events.append(
                WeightVersionEvent(old_version, len(req.output_ids) + 1)
            )
    original(scheduler, new_version)


def _under_way(scheduler):
    """The requests that get a token from a step under way. A step that reads the middle of a prompt
    makes none.
    """
    batches = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    return [req for batch in batches for req in batch.reqs if not req.inflight_middle_chunks]


def _with_versions(payload, pieces, **_):
    """Says with each piece of an answer which weights made which token. SGLang by itself says it
    with the last one only. Its answer that it has new weights goes another way than the pieces, and
    overtakes them.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    if payload is not None:
        served = get_serving().weight_version
        payload.weight_versions = [
            compute_weight_version_spans(req.weight_version_events, served, num_tokens)
            for req, num_tokens in zip(pieces.output_reqs, payload.completion_tokens, strict=True)
        ]
    return payload


async def _at_once(original, controller, asked, request=None):
    """Takes the place of SGLang's own function, which without a pause waits until no request is
    under way. An exchange between two steps need not wait.
    """
    if not asked.group_name.startswith(GROUP):
        return await original(controller, asked, request)
    from sglang.srt.managers.communicator import FanOutCommunicator

    controller.auto_create_handle_loop()
    results = await controller.update_weights_from_distributed_communicator(asked)
    success, message = FanOutCommunicator.merge_results(results)
    if success:
        controller._update_weight_version_if_provided(asked.weight_version)
    return success, message


def _told(said, controller, asked):
    manager = controller.scheduler.weight_updater
    state = {**_buffer(manager).state(), **_update(manager).state()}
    if len(manager._select_runners()) > 1:
        state["stages"] = False  # a draft model takes each update too, in the pause
    said.internal_state["midflight"] = _each(manager, state)
    return said


def _unpinned(original, *given, **named):
    """Makes pinning of memory do nothing if there is no accelerator. SGLang's own LoRA pins memory
    on any machine, and torch refuses that if there is no device to copy it to.
    """
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda tensor, *_: tensor
        for name in ("tensor", "empty", "zeros", "ones", "arange"):
            setattr(torch, name, _without_pinning(getattr(torch, name)))
    return original(*given, **named)


def _without_pinning(make):
    return lambda *given, pin_memory=False, **named: make(*given, **named)


def register():
    """Called by SGLang at the start of each process."""
    add_grammar_backend_choices(["midflight"])
    register_grammar_backend("midflight", ShapeBackend)
    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(made, _with_seeds, HookType.AFTER)
    for name, hook in {
        "sampling_from_probs_torch": _sample,
        "top_k_top_p_min_p_sampling_from_probs_torch": _sample_truncated,
        "multinomial_with_seed": _draw,
    }.items():
        HookRegistry.register(f"sglang.srt.layers.sampler.{name}", hook, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.lora.lora_manager.LoRAManager.__init__", _unpinned, HookType.AROUND
    )
    controls = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
    HookRegistry.register(f"{controls}.update_weights_from_distributed", _at_once, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change",
        _changed,
        HookType.AROUND,
    )
    parts = "sglang.srt.managers.scheduler_components"
    for name, hook in {
        "init_weights_update_group": _begin,
        "update_weights_from_distributed": _take,
        "begin_weight_update": _begin_own,
    }.items():
        HookRegistry.register(
            f"{parts}.weight_updater.SchedulerWeightUpdaterManager.{name}", hook, HookType.AROUND
        )
    HookRegistry.register(
        f"{parts}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        _loaded,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{parts}.output_streamer._GenerationStreamAccumulator.to_payload",
        _with_versions,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        ".load_weights_from_distributed",
        _load_and_note,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{parts}.internal_state.SchedulerInternalStateController.get_internal_state",
        _told,
        HookType.AFTER,
    )
