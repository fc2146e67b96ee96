"""The part of a model that computes text, beside which there may be others."""

from __future__ import annotations

from transformers import PreTrainedModel


def other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Prefixes of the names of parts beside the text tower and the output layer: towers for images,
    projectors.
    """
    decoder = model.get_decoder()
    output = model.get_output_embeddings()
    if model.config.get_text_config() is model.config or decoder is None:
        return ()
    text = {id(module) for module in decoder.modules()}
    if output is not None:
        text.update(id(module) for module in output.modules())
    around = set[str]()
    for name, module in model.named_modules():
        if not text.isdisjoint(map(id, module.modules())):
            around.add(name)
    prefixes: list[str] = []
    for name, _ in model.named_modules():
        if name not in around and name.rpartition(".")[0] in around:
            prefixes.append(f"{name}.")
    return tuple(prefixes)
