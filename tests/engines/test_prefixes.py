"""What a request need not compute, because another has: the tree, and engines that use it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.test_experts import recording
from tests.models.mixtures import tiny_mixture
from tests.models.tiny import tiny_model
from tests.models.zoo import tiny
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.engines.embedded.key_runs import joined, num_keys, oldest
from midflight.engines.embedded.prefixes import Ints, Prefixes
from midflight.models.caches import cache_name
from midflight.types import GenerateRequest, PauseMode

# --- The tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letters:
    """Keys that are their tokens."""

    tokens: tuple[int, ...]
    has_state: bool

    @property
    def num_bytes(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, end: int) -> "Letters":
        return Letters(self.tokens[start:end], self.has_state and end == len(self.tokens))


class Slots:
    """A runner whose slots hold tokens."""

    def __init__(self, *, keeps_states: bool = False) -> None:
        self.keeps_states = keeps_states
        self.held: dict[int, tuple[int, ...]] = {}
        self.taken = 0

    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> Letters:
        assert end <= len(self.held[slot]) and (not at_end or end == len(self.held[slot]))
        self.taken += end - start
        return Letters(self.held[slot][start:end], at_end)

    def put(self, slot: int, spans: Sequence[tuple[Letters, int]]) -> None:
        assert not self.keeps_states or spans[-1][0].has_state
        self.held[slot] = tuple(itertools.chain.from_iterable(span.tokens[:num] for span, num in spans))


def tokens_of(text: str | Sequence[int]) -> Ints:
    return np.array([ord(c) if isinstance(c, str) else c for c in text], dtype=np.int64)


class Kept:
    """A tree and its runner; slot 0 is added from, slot 1 filled."""

    def __init__(self, *, max_bytes: int = 1000, keeps_states: bool = False) -> None:
        self.slots = Slots(keeps_states=keeps_states)
        self.tree = Prefixes(self.slots, max_bytes=max_bytes)

    def add(self, text: str | Sequence[int], *, version: int = 0) -> None:
        tokens = tokens_of(text)
        self.slots.held[0] = tuple(tokens.tolist())
        self.tree.add(0, tokens, ((version, len(tokens)),))

    def known(self, text: str | Sequence[int]) -> tuple[int, int]:
        """How many tokens of it, and of which oldest version; they are in slot 1 then."""
        tokens = tokens_of(text)
        self.slots.held.pop(1, None)
        made_by = self.tree.fill(1, tokens)
        num = num_keys(made_by)
        assert self.slots.held.get(1, ()) == tuple(tokens[:num].tolist())
        return num, oldest(made_by) if made_by else 0


def test_the_next_turn_of_a_conversation_finds_all_of_those_before() -> None:
    kept = Kept()
    kept.add("system user answer")
    assert kept.known("system user answer more") == (18, 0)
    kept.add("system user answer more, and an answer")
    assert kept.slots.taken == len("system user answer more, and an answer"), "what is known is not taken again"
    assert kept.known("system user answer more, and an answer!") == (38, 0)


def test_the_last_token_is_never_said_to_be_known_because_its_logits_are_not() -> None:
    kept = Kept()
    kept.add("abc")
    assert [kept.known(text)[0] for text in ("abc", "ab", "a", "abcd", "x")] == [2, 1, 0, 3, 0]


def test_sequences_share_their_common_beginning_and_no_more() -> None:
    kept = Kept()
    kept.add("to be or not")
    kept.add("to bend")
    kept.add("to be or nought")
    assert kept.tree.num_bytes == len("to be") + len(" or no") + len("t") + len("ught") + len("nd")
    assert [kept.known(text + "?")[0] for text in ("to be or not", "to bend", "to be or nought", "to beg")] == [12, 7, 15, 5]


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    kept = Kept(max_bytes=9)
    kept.add("abcde")
    kept.add("abxy")
    assert kept.known("abcdeZ")[0] == 5  # used now, so that the other end is the oldest
    kept.add("ab123")
    assert kept.known("abxyZ")[0] == 2 and kept.known("ab123Z")[0] == 5 and kept.tree.num_bytes == 8
    kept.add("a sequence that is longer than the room")
    assert kept.tree.num_bytes <= 9


def test_nothing_is_kept_where_there_is_no_room() -> None:
    kept = Kept(max_bytes=0)
    kept.add("abc")
    assert kept.known("abcd") == (0, 0) and kept.slots.taken == 0


def test_older_weights_are_forgotten_with_all_that_stands_behind_them() -> None:
    kept = Kept()
    kept.add("abc", version=1)
    kept.add("abcdef", version=1)
    kept.add("xyz", version=2)
    assert kept.known("abcdefg") == (6, 1)
    kept.tree.forget(before=2)
    assert kept.known("abcdefg") == (0, 0) and kept.known("xyz!") == (3, 2) and kept.tree.num_bytes == 3


def test_newer_keys_replace_older_ones_and_those_that_were_computed_over_them() -> None:
    kept = Kept()
    kept.add("abc", version=1)
    kept.add("abcdef", version=1)
    kept.add("abcd", version=2)
    assert kept.known("abcd!") == (4, 2) and kept.known("abcdef!") == (4, 2)
    kept.add("abcxyz", version=1)
    assert kept.known("abcxyz!") == (3, 2), "its end was computed over other keys"
    assert kept.tree.num_bytes == 4


def lineage(tokens: Sequence[int], versions: Sequence[int]) -> list[int]:
    """The keys of a sequence: each depends on all keys before it."""
    found, key = list[int](), 0
    for token, version in zip(tokens, versions, strict=True):
        key = hash((key, token, version)) % 2**40
        found.append(key)
    return found


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 8), st.booleans()), max_size=14))
def test_keys_are_those_that_the_versions_say_computed_one_behind_the_other(
    asked: list[tuple[list[int], int, bool]],
) -> None:
    """Sequences go on behind keys that are known, or compute all; at some place in each a newer version comes."""
    kept, version = Kept(), 0
    for tokens, place, anew in asked:
        known = [made_by for made_by, num in kept.tree.fill(0, tokens_of(tokens)) for _ in range(num)]
        keys = list(kept.slots.held.get(0, ()))[: len(known)]
        assert keys == lineage(tokens[: len(known)], known)
        versions = [] if anew else known
        while len(versions) < len(tokens):
            version += len(versions) == place
            versions.append(version)
        kept.slots.held[0] = tuple(lineage(tokens, versions))
        kept.tree.add(0, tokens_of(tokens), joined([((made_by, 1),) for made_by in versions]))


def test_states_are_known_only_where_they_were_taken() -> None:
    kept = Kept(keeps_states=True)
    kept.add("abcdef")
    assert kept.known("abcxyz") == (0, 0) and kept.known("abcdefg") == (6, 0) and kept.known("abcdef") == (0, 0)
    kept.add("abcx")
    assert kept.known("abc!") == (0, 0), "the two have it in common, and nobody stopped there"
    kept.add("abc")
    assert kept.known("abc!") == (3, 0) and kept.known("abcdefg") == (6, 0)


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12), st.integers(1, 40))
def test_of_every_sequence_the_longest_known_beginning_is_found(sequences: list[list[int]], room: int) -> None:
    kept, small = Kept(max_bytes=10**6), Kept(max_bytes=room)
    for number, sequence in enumerate(sequences):
        for before in (sequence, [*sequence, 3]):
            common = [
                sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(before[:-1], s, strict=False))) for s in sequences[:number]
            ]
            assert kept.known(before)[0] == max(common, default=0)
            assert small.known(before)[0] <= max(common, default=0)
        kept.add(sequence)
        small.add(sequence)
        assert small.tree.num_bytes <= room
    assert kept.tree.num_bytes == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})


# --- Engines ----------------------------------------------------------------------------------------------------------


def turns(engine: EmbeddedEngine, *, count: int) -> list[tuple[GenerateRequest, Generated, int]]:
    """A conversation in which each turn has all before it and three tokens more; with the tokens that were computed for each."""
    ids, found = ask("hello").input_ids, list[tuple[GenerateRequest, Generated, int]]()
    for number in range(count):
        request = replace(
            ask(request_id=f"{number}", seed=number, max_tokens=4, temperature=0.7), input_ids=ids, num_prompt_tokens=len(ids)
        )
        before = engine._scheduler.num_computed
        generated = engine.generate_all([request])[0]
        found.append((request, generated, engine._scheduler.num_computed - before))
        ids = (*ids, *generated.token_ids, *b"so?")
    return found


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1", "gptj"])
def test_i5_a_turn_computes_only_what_is_new_and_its_tokens_are_those_of_a_new_engine(name: str) -> None:
    """I5, also with states, and for a model whose sequences go alone. New are the last token of the answer before, which nobody has run yet, and three that came from outside; then three of four answered."""
    found = turns(make_engine(tiny(name)), count=5)
    assert [computed for *_, computed in found] == [5 + 3] + [1 + 3 + 3] * 4
    for request, generated, _ in found:
        alone = make_engine(tiny(name)).generate_all([request])[0]
        assert generated.token_ids == alone.token_ids
        assert generated.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_the_answers_to_a_prompt_compute_it_once_whenever_they_come() -> None:
    engine = make_engine(max_running=2)
    for number in range(6):  # one after the other, so that no two run together
        engine.generate_all([ask("one and the same", request_id=f"{number}", seed=number, max_tokens=4)])
        engine.generate_all([ask("another", request_id=f"x{number}", seed=number, max_tokens=4)])
    assert engine._scheduler.num_computed == 16 + 7 + 10 * 1 + 12 * 3


def test_a_turn_that_was_aborted_goes_on_from_its_keys() -> None:
    engine = make_engine()
    whole = make_engine().generate_all([ask(max_tokens=8)])[0]
    cut = engine.generate_all([ask(max_tokens=5)])[0]
    request = ask(max_tokens=8)
    resumed = replace(request, input_ids=(*request.input_ids, *cut.token_ids))
    before = engine._scheduler.num_computed
    assert (*cut.token_ids, *engine.generate_all([resumed])[0].token_ids) == whole.token_ids
    assert engine._scheduler.num_computed - before == 3 and engine.reading().num_reused == 9


def test_keys_of_older_weights_are_used_only_as_far_as_they_may_be_and_tokens_say_so() -> None:
    for age, versions in ((0, {1}), (1, {0})):
        receiver = MemoryReceiver()
        engine = make_engine(receiver=receiver, prefix_age=age)
        first = engine.generate_all([ask(max_tokens=4)])[0]
        engine._weights.stage(receiver.publish(1, tiny_model(seed=1)))
        engine._commit(1)
        ids = (*ask().input_ids, *first.token_ids, 7)
        second = engine.generate_all([replace(ask(max_tokens=4), input_ids=ids, num_prompt_tokens=len(ids))])[0]
        assert set(second.versions) == {1} and set(second.kv_versions) == versions


def logprob_of(token: int, models: Sequence[PreTrainedModel], ids: Sequence[int], made_by: Sequence[int]) -> float:
    """The log-probability of a token behind `ids`, whose keys were made one after the other by these versions."""
    name = cache_name(models[0])
    assert name is not None
    keys, logits = None, torch.empty(0)
    for version, run in itertools.groupby(range(len(ids)), key=lambda place: made_by[place]):
        read = torch.tensor([[ids[place] for place in run]])
        with torch.no_grad():
            made = models[version](read, use_cache=True, **{} if keys is None else {name: keys})
        keys, logits = made[name], made.logits[0, -1]
    return float(logits.log_softmax(-1)[token])


@pytest.mark.parametrize(("guesses", "mode"), [(0, None), (3, None), (0, PauseMode.RECOMPUTE)])
def test_the_keys_that_an_engine_tells_are_those_that_its_tokens_attended_to(guesses: int, mode: PauseMode | None) -> None:
    """Conversations that begin alike, while a version comes every few steps: in prompts, in answers and between them."""
    receiver, num_versions = MemoryReceiver(), 9
    models = [tiny_model(seed=seed) for seed in range(num_versions)]
    engine = make_engine(tiny_model(seed=0), receiver=receiver, prefix_age=2, guesses=guesses, max_batch_tokens=9, max_running=3)
    scheduler = engine._scheduler
    running: dict[int, tuple[list[int], list[int]]] = {}
    num_told = num_checked = version = 0

    def begin(ids: Sequence[int]) -> None:
        request = replace(ask(max_tokens=5, seed=len(ids), temperature=1.0), input_ids=tuple(ids), num_prompt_tokens=len(ids))
        submission = engine._submission(request, 0, None)
        scheduler.submit(submission)
        running[submission.handle] = ([*ids], [])

    for number in range(3):
        begin([*b"system", *b"says", number])
    for count in itertools.count(1):
        if count % 4 == 0 and version + 1 < num_versions:
            version += 1
            engine._weights.stage(receiver.publish(version, models[version]))
            if mode is not None:
                scheduler.pause(mode)
            engine._commit(version)
            scheduler.resume()
        step = scheduler.step()
        told = dict(step.key_runs)
        num_told += len(told)
        for handle, token, logprob, oldest_key in step.rows():
            ids, made_by = running[handle]
            if handle in told:
                made_by[:] = [made for made, length in told.pop(handle) for _ in range(length)]
            elif oldest_key == step.version:
                made_by[:] = [step.version] * len(ids)
            else:
                made_by.append(step.version)
            assert min(made_by) == oldest_key and len(made_by) == len(ids)
            assert logprob == pytest.approx(logprob_of(token, models, ids, made_by), abs=1e-4)
            ids.append(token)
            num_checked += 1
        assert not told
        for handle, _, _ in step.finishes:
            ids, _ = running.pop(handle)
            if len(ids) < 50:
                begin([*ids, *b"so?"])
        if not running:
            break
    assert num_checked > 60 and version > 4 and num_told > (0 if mode else 5)


def test_a_paused_engine_forgets_who_computes_a_prompt_when_its_weights_change() -> None:
    """Who waited for a prompt under the old weights computes it under the new ones."""
    receiver = MemoryReceiver()
    engine = make_engine(receiver=receiver, max_batch_tokens=8)
    same = [ask("a prompt of several steps, long", request_id=f"{n}", seed=n, max_tokens=3) for n in range(3)]
    for request in same:
        engine._scheduler.submit(engine._submission(request, 0, None))
    engine._scheduler.step()
    engine._scheduler.pause(PauseMode.KEEP)
    engine._weights.stage(receiver.publish(1, tiny_model(seed=1)))
    engine._commit(1)
    engine._scheduler.resume()
    steps = [engine._scheduler.step() for _ in range(40)]
    assert sum(len(step.finishes) for step in steps) == 3 and not engine._scheduler.has_work()
    assert sum(len(step.token_ids) for step in steps) == 9


def test_experts_of_known_tokens_are_those_that_they_were_computed_with() -> None:
    engine = recording(tiny_mixture("qwen3_moe"))
    (_, first, _), (request, second, _), *_ = turns(engine, count=3)
    alone = recording(tiny_mixture("qwen3_moe")).generate_all([request])[0]
    assert second.experts == alone.experts and first.experts
