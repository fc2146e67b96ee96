"""A finished run proven, made again step by step, packed for somebody else, and trained on with another loss: by the commands that people type."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from midflight.archive.store_reader import reading
from midflight.types.digests import read_conditions

from .processes import CONFIG, Command, arguments_of, gone, pids, status_of, steps

OPTIONS = (
    *("run.steps=6", "warm_start.target_accuracy=0.02", "warm_start.max_steps=60", "trainer.learning_rate=0.01"),
    *("trainer.checkpoint_every=1", "trainer.keep_checkpoints=4", "environment.entry=graded:answer"),
)
GRADED = """
from midflight.environments.single_turn import answer as asked

calls = 0


async def answer(task, client):
    global calls
    calls += 1
    number = calls
    await asked(task, client)
    return number % 4 / 4
"""
"""Its rewards differ within a group, so that every step moves the weights."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in `run`."""
    found = tmp_path_factory.mktemp("replay")
    (found / "run.toml").write_text(CONFIG)
    (found / "graded.py").write_text(GRADED)
    options = [x for option in OPTIONS for x in ("--set", option)]
    # not forked: a forked trainer has the threads of what it was forked from, and other last bits
    command = Command("train", "run.toml", "--folder", "run", *options, folder=found, forked=False)
    assert command.wait(120) == 0, command.said
    assert steps(found / "run")[-1]["digests"]["chain"] in command.said, "the last digest is printed"
    return found


@pytest.fixture(scope="module")
def spoilt(place: Path) -> Path:
    """The same folder, with copies of the run whose checkpoints cannot be read, or are of a later Midflight."""
    for name, old, new in (("damaged", "}", ""), ("newer", '"format":2', '"format":99')):
        shutil.copytree(place / "run", place / name)
        for state in (place / name / "checkpoints").glob("version-*/state.json"):
            text = state.read_text()
            assert old in text
            state.write_text(text.replace(old, new))
    return place


@pytest.fixture
def midflight(place: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs a command to its end: its exit status, and what it said."""
    begun: list[Command] = []

    def run(*arguments: object) -> tuple[int, str]:
        begun.append(Command(*arguments, folder=place, forked=arguments[0] != "replay"))
        return begun[-1].wait(120), begun[-1].said

    yield run
    for command in begun:
        command.end()


def test_a_finished_run_is_proven_and_its_digest_is_kept_wherever_it_says(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    last = steps(place / "run")[-1]["digests"]["chain"]
    status, said = midflight("ledger", "run", "--prove", "--digest", last[:20], "--weights", "--witness", 8)
    assert status == 0, said
    assert said.count("proven: ") == 4 and "5 kept sets of weights are those that the steps made" in said and last in said
    assert json.loads((place / "run" / "summary.json").read_text())["digest"] == last
    assert json.loads((place / "run" / "model" / "config.json").read_text())["midflight_steps_digest"] == last


def test_weights_that_did_not_make_the_tokens_are_found(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    changed = place / "other-weights"
    shutil.copytree(place / "run", changed)
    newest, before = sorted((changed / "checkpoints").glob("version-*"), reverse=True)[:2]
    for kept in sorted((changed / "checkpoints").glob("version-*"))[:-1]:
        shutil.copy(newest / "rank-00000.safetensors", kept / "rank-00000.safetensors")
    assert before.is_dir()
    status, said = midflight("ledger", changed, "--weights")
    assert status == 1 and "wrong: " in said and "computed again by transformers" in said, said
    assert said.count("does not match the hash in manifest.json") == 3


def test_kept_weights_that_are_not_those_of_the_steps_are_found_though_their_hashes_fit(
    place: Path, midflight: Callable[..., tuple[int, str]]
) -> None:
    changed = place / "swapped-weights"
    shutil.copytree(place / "run", changed)
    newest, before = sorted((changed / "checkpoints").glob("version-*"), reverse=True)[:2]
    shutil.copy(newest / "rank-00000.safetensors", before / "rank-00000.safetensors")
    manifest = json.loads((before / "manifest.json").read_text())
    manifest["files"]["rank-00000.safetensors"] = json.loads((newest / "manifest.json").read_text())["files"]["rank-00000.safetensors"]
    (before / "manifest.json").write_text(json.dumps(manifest))
    shutil.copy(changed / "start" / "model.safetensors", changed / "model" / "model.safetensors")
    status, said = midflight("ledger", changed, "--weights")
    assert status == 1 and "the checkpoint of version 5 has other weights than its step made" in said, said
    assert "model has other weights than the last step made" in said and "3 kept sets of weights" in said


def test_each_step_whose_checkpoint_is_kept_is_made_again(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    for step in (4, 5, 6):
        status, said = midflight("replay", "run", "--step", step)
        assert status == 0 and "differs" not in said, said
        assert said.count("equal") == 5, said


def test_a_token_is_explained(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    status, said = midflight("replay", "run", "--step", 6, "--explain", "0:0")
    assert status == 0 and "no: it is context" in said, said
    _, said = midflight("replay", "run", "--step", 6, "--explain", f"0:{first_generated(place / 'run')}")
    for name in ("ratio to the policy that sampled", "weight of the correction", "taken out by", "advantage", "derivative of the loss"):
        assert name in said, said
    status, said = midflight("replay", "run", "--step", 6, "--explain", "0:9999")
    assert status != 0 and "tokens, from 0 on, and no token 9999" in said


def first_generated(run: Path) -> int:
    """The place of the first generated token of the first row that step 6 trained on."""
    with reading(run) as store:
        ((value,),) = store.ask(
            "SELECT rows FROM rollouts JOIN groups USING (epoch, position, attempt) WHERE version = 6 AND reward IS NOT NULL "
            "AND num_trainable > 0 ORDER BY epoch, position, attempt, sample LIMIT 1"
        )
        return store.rows(value)[0].loss_mask.tolist().index(True)


def test_a_step_in_one_file_is_made_again_without_the_run(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    status, said = midflight("replay", "run", "--step", 6, "--bundle", "step.bundle")
    assert status == 0 and "Warning" not in said, said
    status, said = midflight("replay", "run", "--step", 6, "--bundle", "light.bundle", "--no-weights")
    assert status == 0 and (place / "light.bundle").stat().st_size < (place / "step.bundle").stat().st_size
    aside = place / "run-aside"
    (place / "run").rename(aside)
    try:
        status, said = midflight("replay", "step.bundle")
        assert status == 0 and "differs" not in said, said
        status, said = midflight("replay", "light.bundle")
        assert status != 0 and "has no weights, and" in said and "is not there" in said, said
    finally:
        aside.rename(place / "run")
    status, said = midflight("replay", "light.bundle")
    assert status == 0, said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--step", "77"), "has no step 77; its journal has steps 1 to 6"),
        (("run", "--step", "1"), "has no checkpoint from before step 1"),
        (("run",), "say which step to make again"),
        (("run.toml",), "is no bundle"),
        (("nowhere", "--step", "1"), "nowhere is not a folder"),
        (("run", "--step", "77", "--bundle", "none.bundle"), "has no step 77"),
        (("damaged", "--step", "6"), "state.json cannot be read"),
        (("newer", "--step", "6"), "has format 99, this version of midflight reads"),
    ],
)
def test_what_cannot_be_made_again_is_refused_in_a_sentence(
    spoilt: Path, midflight: Callable[..., tuple[int, str]], arguments: tuple[str, ...], said: str
) -> None:
    status, found = midflight("replay", *arguments)
    assert status != 0 and said in " ".join(found.split()) and "Traceback" not in found, found


def test_another_loss_is_trained_on_the_same_rollouts(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    for name, option in (("same", "run.seed=0"), ("other", "objective.clip_high=0.05")):
        status, said = midflight("train", "run.toml", "--rollouts-from", "run", "--folder", name, "--set", option, "--set", "run.steps=4")
        assert status == 0, said
        made = steps(place / name)
        assert [line["step"] for line in made] == [1, 2, 3, 4] and made[0]["trainer"]["grad_norm"] > 0
        assert (place / name / "model" / "model.safetensors").exists()
    status, said = midflight("train", "run.toml", "--rollouts-from", "run", "--folder", "same")
    assert status != 0 and "is not empty" in said


def test_several_ranks_train_on_recorded_rollouts_as_one_does(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    exact = ("--rollouts-from", "run", "--set", "run.steps=3", "--set", "model.dtype=float64")
    for ranks in (1, 2):
        status, said = midflight("train", "run.toml", *exact, "--folder", f"by-{ranks}", "--set", f"trainer.ranks={ranks}")
        assert status == 0 and said.count("tokens on 2 ranks") == (3 if ranks == 2 else 0), said
    one, two = (steps(place / f"by-{ranks}") for ranks in (1, 2))
    assert [line["step"] for line in two] == [1, 2, 3]
    for name in ("loss", "grad_norm", "tokens/trained"):
        values = [[line["trainer"][name] for line in lines] for lines in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-6), name
    weights = [load_file(place / f"by-{ranks}" / "model" / "model.safetensors") for ranks in (1, 2)]
    assert all(torch.allclose(weights[1][name], tensor, atol=1e-6) for name, tensor in weights[0].items())


def test_a_rank_that_fails_ends_the_others(place: Path) -> None:
    other = place / "other.toml"
    other.write_text(CONFIG.replace("hidden_size = 32", 'path = "missing"'))
    options = ("--folder", "none", "--set", "trainer.ranks=2")
    # not forked: a forked command has another place in its files than the processes that it starts
    command = Command("train", "other.toml", "--rollouts-from", "run", *options, folder=place, forked=False)
    assert command.wait(120) != 0 and "Traceback" not in command.said, command.said
    assert "no folder 'missing'" in command.said and "ended with status 1" in command.said, command.said
    assert not (place / "none").exists()


def test_no_rank_outlives_a_command_that_is_killed(place: Path) -> None:
    options = ("--set", "trainer.ranks=2", "--set", "model.dtype=float64", "--folder", "killed")
    command = Command("train", "run.toml", "--rollouts-from", "run", *options, folder=place)
    try:
        command.until(lambda: len(ranks_of(command)) == 2, "two ranks")
        ranks = ranks_of(command)
        command.process.kill()
        assert gone(ranks, seconds=60) and not (place / "killed" / "model").exists()
    finally:
        command.end()


def ranks_of(command: Command) -> list[int]:
    """The process ids of the ranks that the command has started."""
    return [pid for pid in pids() if "midflight.run.replay.rank_process" in arguments_of(pid) and str(command.process.pid) in family(pid)]


def family(pid: int) -> list[str]:
    """The process that started this one, and the one that started that."""
    parent = status_of(pid).get("PPid", "0")
    return [parent, status_of(int(parent)).get("PPid", "0")]


def test_the_books_decide_as_they_did(midflight: Callable[..., tuple[int, str]]) -> None:
    status, said = midflight("replay", "run", "--decisions")
    assert status == 0 and "6 batches were decided again; 0 otherwise" in said and "not recorded" not in said, said
    assert int(said.split()[0]) >= 12, "two groups a step were started"


def test_an_agent_runs_again_on_its_recorded_answers(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    with closing(sqlite3.connect(place / "run" / "store.sqlite")) as store:
        (key, reward) = store.execute(
            "SELECT epoch || '-' || position || '-' || attempt || '-' || sample, reward FROM rollouts WHERE num_trainable > 0 LIMIT 1"
        ).fetchone()
    status, said = midflight("replay", "run", "--rollout", key)
    assert "1 of 1 recorded answers were asked for again" in said and f"reward {reward} then, 0.25 now" in said, said
    assert (status == 0) == (reward == 0.25)
    (place / "graded.py").write_text(GRADED.replace("await asked(task, client)", "await asked(changed(task), client)") + CHANGED)
    try:
        status, said = midflight("replay", "run", "--rollout", key)
    finally:
        (place / "graded.py").write_text(GRADED)
    assert status == 1 and "0 of 1 recorded answers" in said and "asked something else" in said, said
    status, said = midflight("replay", "run", "--rollout", "7-7-7-7")
    assert status != 0 and "has no rollout 7-7-7-7 that has ended" in said


CHANGED = """

def changed(task):
    from dataclasses import replace

    return replace(task, data={**task.data, "question": "what else?"})
"""


def test_truncated_sampling_and_older_keys_are_computed_again_too(place: Path, midflight: Callable[..., tuple[int, str]]) -> None:
    truncated = (*OPTIONS, "environment.top_p=0.8", "engine.prefix_age=2", "rollout.max_staleness=2")
    status, said = midflight("train", "run.toml", "--folder", "cut", *(x for option in truncated for x in ("--set", option)))
    assert status == 0, said
    status, said = midflight("ledger", "cut", "--prove", "--weights", "--witness", 8)
    assert status == 0 and said.count("proven: ") == 4 and "not judged" not in said, said
    assert all(line["trainer"]["rho/mean"] > 0 for line in steps(place / "cut"))
    assert num_with_older_keys(place / "cut") > 10


def num_with_older_keys(run: Path) -> int:
    """The number of answers whose record says that an engine began with keys of older versions."""
    with reading(run) as store:
        rows = [row for (blob,) in store.each("SELECT rows FROM rollouts") for row in store.rows(blob)]
    return sum(1 for row in rows for record in row.records if read_conditions(record.conditions).older_keys)


def test_a_step_of_several_ranks_is_made_again_and_its_gradients_are_those_of_the_books(
    place: Path, midflight: Callable[..., tuple[int, str]]
) -> None:
    options = (*OPTIONS, "trainer.ranks=2", "trainer.micro_batch_tokens=64")
    status, said = midflight("train", "run.toml", "--folder", "ranks", *(x for option in options for x in ("--set", option)))
    assert status == 0, said
    newest = place / "ranks" / "checkpoints" / (place / "ranks" / "checkpoints" / "latest").read_text().strip()
    assert json.loads((newest / "state.json").read_text())["num_ranks"] == 2
    status, said = midflight("ledger", "ranks", "--prove", "--weights", "--witness", 8)
    assert status == 0 and said.count("proven: ") == 4 and "proven: of 8 rollouts of step 6, " in said, said
    status, said = midflight("replay", "ranks", "--step", 6)
    assert status == 0 and "differs" not in said, said
