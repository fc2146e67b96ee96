"""Runs in vLLM's interpreter: `beside_vllm.py INSIDE FIRST SECOND`. In a worker on a CPU, which no NCCL reaches, it gives vLLM's own engine
buckets from a folder in the place of a broadcast, and prints one JSON line of what holds.
"""

import json
import sys
from pathlib import Path


def main(inside: str, first: str, second: str) -> None:
    sys.path.insert(0, inside)
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig, set_current_vllm_config

    llm = LLM(
        first,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        worker_extension_cls="midflight_vllm.Loader",
        weight_transfer_config=WeightTransferConfig(backend="nccl"),
    )
    driver = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    worker = getattr(driver, "worker", driver)
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)

    def said():
        (answer,) = llm.generate([{"prompt_token_ids": list(range(40, 60))}], greedy, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def numbers():
        return {name: tensor.clone() for name, tensor in worker.model_runner.get_model().named_parameters()}

    def same(one, other):
        return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)

    def comes(folder, served):
        """Whether all answers while it comes are those before."""
        before = said()
        tensors = [*load_file(Path(folder) / "model.safetensors").items()]
        worker.midflight_stage(served)
        worker.start_weight_update()
        answers = []
        for start in range(0, len(tensors), 5):
            with set_current_vllm_config(worker.vllm_config):
                worker.weight_transfer_engine.model.load_weights(tensors[start : start + 5])
            answers.append(said())
        worker.finish_weight_update()
        answers.append(said())
        return len(worker.midflight_landed()["arrived"]) == len(answers) - 1 and all(answer == before for answer in answers)

    found = {"stages": worker.midflight_landed()["stages"]}
    answer, weights = said(), numbers()
    found["first comes"] = comes(second, "0")
    worker.midflight_swap("0")
    swapped = said()
    found["another answer"] = swapped != answer
    # on a CPU layers compute with packed copies of their weights, so only the weights show what was taken back
    for deed in ("taken back", "taken back again"):
        worker.midflight_take_back("0", "1")
        found[deed] = same(numbers(), weights)
    worker.midflight_load(second)
    found["as by its folder"] = said() == swapped
    found["first comes back"] = comes(first, "1")
    worker.midflight_swap("1")
    found["first answer"] = said() == answer and same(numbers(), weights)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
