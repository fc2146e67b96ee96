"""Checks of models. A model must have a tokenizer of its own and be one that can be loaded, a
teacher must be able to score the student's tokens, and a run that goes on must have the model that
it began with.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from midflight.config.derived import MADE_ARCHITECTURE, lora_alpha, model_sizes
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.models.adapters import adapter_of
from midflight.models.sizes import num_experts_of, read_config, sizes_of
from midflight.models.tokenizers import check_tokenizer
from midflight.run.launcher.checks.check import Finding, Plan, error, ok, warning
from midflight.run.launcher.trial import STALL_SECONDS, TrialWait, module_answer
from midflight.text.byte_tokenizer import byte_tokenizer, write_byte_tokenizer
from midflight.text.formats.format import reasoning_format, tool_format
from midflight.text.tokenizer import Tokenizer


def model(plan: Plan) -> Iterator[Finding]:
    """Says the sizes of a model folder. Raises `ModelNotFound` if it is none."""
    folder = plan.config.model.path
    if folder is None:
        return
    sizes = sizes_of(folder)
    text = (
        f"{_architecture(folder)}, {sizes.num_parameters:,} parameters, context of "
        f"{sizes.max_context or 'unknown'}"
    )
    yield ok("model", text, f"whether it is computed right: midflight check-model {folder}")


def tokenizer(plan: Plan) -> Iterator[Finding]:
    """Loads the tokenizer of the model, or of a model that is made."""
    plan.doing("loads the tokenizer")
    folder = plan.config.model.path
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="midflight-") as made:
            write_byte_tokenizer(Path(made))
            plan.loaded.tokenizer = Tokenizer.load(Path(made))
        return
    loaded = plan.loaded.tokenizer = check_tokenizer(folder)
    rows = sizes_of(folder).vocab_size
    text = f"{loaded.vocab_size} ids, the model has {rows} rows of embeddings"
    yield ok("tokenizer", text)


def chat_template(plan: Plan) -> Iterator[Finding]:
    """Says what the template of a model folder does with a question and its answer."""
    tokenizer = plan.loaded.tokenizer
    if tokenizer is None or plan.config.model.path is None:
        return
    if not tokenizer.eos_token_ids:
        yield warning(
            "end of an answer",
            "no token ends one, so that each goes on to its limit",
            "name eos_token_id in generation_config.json",
        )
    if tokenizer.template is None:
        yield warning(
            "chat template",
            "there is none, so that chats are refused",
            "add chat_template.jinja to the folder",
        )
        return
    asked = tokenizer.render([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    whole = tokenizer.render(
        [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "two"}]
    )
    calls = tool_format("auto", tokenizer)
    called = type(calls).__name__ if calls else "Hermes (no sign of another)"
    thinking = "thinks" if reasoning_format("auto", tokenizer) else "no thinking"
    yield ok(
        "chat template",
        f"writes a question in {len(tokenizer.encode(asked))} tokens; calls as {called}, "
        f"{thinking}",
    )
    behind = tokenizer.encode(whole.rpartition("two")[2])
    if tokenizer.eos_token_ids and not set(behind[:1]) & tokenizer.eos_token_ids:
        text = (
            "the template does not close an answer with a token that ends one, so that chats go "
            "on to their limit"
        )
        remedy = "add the token behind an answer to eos_token_id in generation_config.json"
        yield warning("end of an answer", text, remedy)


def architecture(plan: Plan) -> Iterator[Finding]:
    """Checks that the model's folder can be loaded, and says what adapters do not reach."""
    folder = plan.config.model.path
    if folder is None:
        return
    from midflight.models.load import check_folder  # it imports torch

    plan.doing("looks at the model")
    check_folder(folder)
    number = 0 if plan.config.lora.rank is None else num_experts_of(folder)
    if number:
        yield warning(
            "lora",
            f"[lora] does not reach the {number} experts of each layer, nor their router: they "
            "stay as they are, and adapters train the linear layers beside them, attention "
            "first of all. Without [lora] everything is trained.",
        )


def adapters(plan: Plan) -> None:
    """Raises `ConfigError` if the model has no such layers as `[lora]` adapts. The model is made as
    the trainer makes it, but without its numbers.
    """
    lora = plan.config.lora
    if lora.rank is None:
        return
    import torch

    from midflight.models.creation import make_model
    from midflight.models.load import outline
    from midflight.models.lora import check_new, lora_config

    plan.doing("looks for the layers of lora.targets")
    section = plan.config.model
    if section.path is not None:
        check_new(adapter_of(section.path) is not None)
        made = outline(section.path)
    else:
        sizes = model_sizes(section)
        with torch.device("meta"):
            made = make_model(
                vocab_size=sizes.vocab_size,
                hidden_size=section.hidden_size,
                intermediate_size=section.intermediate_size,
                num_layers=section.num_layers,
                num_heads=section.num_heads,
                num_kv_heads=section.num_kv_heads,
                max_context=section.max_context,
                seed=0,
                dtype=section.dtype,
            )
    lora_config(made, rank=lora.rank, alpha=lora_alpha(lora), targets=lora.targets)


# --- A teacher ------------------------------------------------------------------------------------


def teacher(plan: Plan) -> None:
    """Checks the teacher of a run that has one."""
    check_teacher(plan.config)


def check_teacher(config: Config) -> None:
    """Raises `ConfigError` if the teacher's folder has no model, another vocabulary or another
    tokenizer; nothing without a teacher.
    """
    teacher = config.distillation.teacher
    if teacher is None:
        return
    if not teacher.is_dir():
        raise ConfigError(
            f"distillation.teacher is {str(teacher)!r}, and there is no such folder; give that of "
            "a Hugging Face model."
        )
    theirs = sizes_of(teacher).vocab_size
    ours = model_sizes(config.model).vocab_size
    if theirs < ours:  # further ones are padding: the tokenizers are compared below
        raise ConfigError(
            f"distillation.teacher has a vocabulary of {theirs} tokens, fewer than the student's "
            f"{ours}; choose a teacher of the student's family."
        )
    their_ids = _ids(teacher)
    our_ids = _ids(config.model.path)
    different = sorted(their_ids.items() ^ our_ids.items(), key=lambda item: item[1])
    if different:
        token, number = different[0]
        raise ConfigError(
            "distillation.teacher has another tokenizer: only one of teacher and student has "
            f"{token!r} as token {number}; choose a teacher of the student's family."
        )


def _ids(folder: Path | None) -> dict[str, int]:
    """Ids by token, for a model folder or for made models."""
    backend = byte_tokenizer() if folder is None else Tokenizer.load(folder).backend
    return backend.get_vocab(with_added_tokens=True)


# --- A run that goes on ---------------------------------------------------------------------------


def check_same_model(config: Config) -> None:
    """Raises `ConfigError` with the differences between the configured model and the one in the
    run's folder. Reads headers only.
    """
    start = Path(config.run.folder) / "start"
    if not (start / "config.json").is_file():
        return  # it had not begun: there is no checkpoint to go on from, either
    # A model that is made has no stored numbers yet, so they are not compared.
    began = asdict(replace(sizes_of(start), stored=0))
    asked = asdict(replace(model_sizes(config.model), stored=0))
    began["architecture"] = _architecture(start)
    asked["architecture"] = _architecture(config.model.path)
    adapter = adapter_of(start)
    began["lora.rank"] = None if adapter is None else adapter.rank
    began["lora.alpha"] = None if adapter is None else adapter.alpha
    asked["lora.rank"], asked["lora.alpha"] = _adapters_asked(config)
    if adapter is not None and config.lora.targets:
        began["lora.targets"] = sorted(adapter.targets)
        asked["lora.targets"] = sorted(config.lora.targets)
    differing = [
        f"{name} was {began[name]} and is now {asked[name]}"
        for name in began
        if began[name] != asked[name]
    ]
    if differing:
        raise ConfigError(
            f"resuming {config.run.folder}: it began with another model: {', '.join(differing)}. "
            "Configure the model it began with, or start in another folder."
        )


def _architecture(folder: Path | None) -> str:
    """The architecture that `transformers` would load; without a folder, that of made models."""
    return MADE_ARCHITECTURE if folder is None else str(read_config(folder).get("model_type"))


def _adapters_asked(config: Config) -> tuple[int | None, float | None]:
    """Rank and alpha of the adapters that a new run would train: its own, or those that the model
    folder brings.
    """
    if config.lora.rank is not None:
        return config.lora.rank, lora_alpha(config.lora)
    given = None if config.model.path is None else adapter_of(Path(config.model.path))
    return (None, None) if given is None else (given.rank, given.alpha)


# --- What the parts of a run compute --------------------------------------------------------------


def proofs(plan: Plan) -> Iterator[Finding]:
    """Says whether each part computes what the model computes. Trainer and embedded engine refuse
    by themselves, when they load it, a model that they do not compute right.
    """
    section = plan.config.model
    if section.path is None:
        return
    stall_seconds = plan.config.run.stall_seconds
    refusing = ["trainer:"]
    if plan.config.engine.kind == "embedded":
        refusing.append("engine:")
    for is_right, line in prove(section.path, section.max_context, stall_seconds=stall_seconds):
        say = ok
        if not is_right:
            say = error if line.startswith(tuple(refusing)) else warning
        yield say("proofs", f"model, {line}")


def prove(
    folder: Path, max_context: int, *, stall_seconds: float = STALL_SECONDS
) -> list[tuple[bool, str]]:
    """Returns whether trainer, embedded engine and export compute the same as the model, each with
    a line about it. Raises `ConfigError` if the folder is not a model. Waits for a process that
    tries them as long as that moves, and reports the wait.
    """
    answer = module_answer(
        "checks.proofs",
        TrialWait(f"checking the model in {str(folder)!r}", stall_seconds),
        str(folder),
        str(max_context),
    )
    found = msgspec.json.decode(answer, type=list[tuple[bool, str]] | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found
