import pytest
import torch
from tests.engines.models import ask, make_engine, tiny_model
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import Generation
from midflight.types import GenerateRequest


def reference_logprobs(model: PreTrainedModel, request: GenerateRequest, generation: Generation) -> torch.Tensor:
    """Log-probabilities of the generated tokens by one plain forward of `transformers`."""
    ids = torch.tensor([[*request.input_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / request.sampling.temperature
    start = len(request.input_ids)
    rows = torch.log_softmax(logits, -1)[start - 1 : -1]
    return rows.gather(-1, ids[0, start:, None])[:, 0]


REQUESTS = [
    ask("a", request_id="0", max_tokens=20),
    ask("the same prompt", request_id="1", seed=3),
    ask("the same prompt", request_id="2", seed=4),
]
REQUESTS += [ask("x" * (3 + 5 * i), request_id=f"{3 + i}", seed=i, max_tokens=3 + i, temperature=0.7) for i in range(8)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("max_batch_tokens", [8, 256])
def test_logprobs_agree_with_a_plain_forward_whatever_the_batch(dtype: str, tolerance: float, max_batch_tokens: int) -> None:
    model = tiny_model(dtype=dtype)
    generations = make_engine(model, max_batch_tokens=max_batch_tokens, max_running=5).generate_all(REQUESTS)
    reference_model = tiny_model(dtype=dtype)
    for request, generation in zip(REQUESTS, generations, strict=True):
        assert len(generation.token_ids) == request.sampling.max_tokens
        difference = reference_logprobs(reference_model, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < tolerance


def test_a_served_model_still_computes_plain_forwards() -> None:
    model, plain = tiny_model(), tiny_model()
    make_engine(model).generate_all([ask()])
    ids = torch.randint(0, 262, (2, 9))
    assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6)
