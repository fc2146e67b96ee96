"""The order of tasks: seeded, endless, complete, and the same again from any position."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.environments.seeded_stream import SeededStream
from midflight.environments.sources import Source
from midflight.errors import ConfigError
from midflight.types import GroupKey, Task


def source(name: str, size: int, *, weight: float = 1.0) -> Source:
    return Source(name, weight, tuple(Task(str(i), name) for i in range(size)))


def take(stream: SeededStream, count: int) -> list[tuple[GroupKey, Task]]:
    return [stream.next() for _ in range(count)]


def test_three_epochs_are_three_different_permutations_without_a_gap():
    drawn = take(SeededStream([source("a", 10)], seed=1), 30)
    assert [key for key, _ in drawn] == [GroupKey(epoch, index) for epoch in range(3) for index in range(10)]
    orders = [[task.id for _, task in drawn[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(order) == [str(i) for i in range(10)] for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_is_a_function_of_the_seed():
    def order(seed: int) -> list[str]:
        return [task.id for _, task in take(SeededStream([source("a", 50)], seed=seed), 150)]

    assert order(1) == order(1) != order(2)


def test_sources_share_the_stream_by_weight_and_none_skips_a_task():
    stream = SeededStream([source("a", 40, weight=3), source("b", 40, weight=1)], seed=0)
    assert stream.epoch_length == 80
    epochs = [[task for _, task in take(stream, 80)] for _ in range(4)]
    assert all(Counter(task.source for task in epoch) == {"a": 60, "b": 20} for epoch in epochs)
    seen = Counter((task.source, task.id) for epoch in epochs for task in epoch)
    assert all(seen["a", str(i)] == 6 and seen["b", str(i)] == 2 for i in range(40))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), data=st.data())
def test_whatever_the_weights_each_source_goes_through_whole_permutations(sizes: list[int], data: st.DataObject):
    weights = [data.draw(st.floats(0.001, 1000)) for _ in sizes]
    stream = SeededStream([source(f"s{i}", n, weight=w) for i, (n, w) in enumerate(zip(sizes, weights, strict=True))], seed=3)
    assert stream.epoch_length == sum(sizes)
    drawn = [task for _, task in take(stream, 3 * sum(sizes))]
    for i, n in enumerate(sizes):
        ids = [task.id for task in drawn if task.source == f"s{i}"]
        assert len(ids) >= 3
        for start in range(0, len(ids), n):
            part = ids[start : start + n]
            assert len(set(part)) == len(part)


@pytest.mark.parametrize(("epoch", "index"), [(0, 0), (0, 7), (2, 0), (1, 59), (1, 60)])
def test_a_stream_started_at_a_position_continues_as_the_first_would_have(epoch: int, index: int):
    sources = [source("a", 40, weight=2), source("b", 20)]
    whole = take(SeededStream(sources, seed=5), 240)
    resumed = SeededStream(sources, seed=5)
    resumed.seek(epoch, index)
    assert take(resumed, 50) == list(islice(whole, epoch * 60 + index, epoch * 60 + index + 50))


def test_the_position_is_that_of_the_next_new_task_and_a_task_is_found_by_its_own():
    stream = SeededStream([source("a", 5)], seed=0)
    drawn = take(stream, 7)
    assert stream.position == (1, 2)
    assert all(stream.task_at(key.epoch, key.index) == task for key, task in drawn)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no source"),
        ([source("a", 0)], "'a' has no training task"),
        ([source("a", 2), source("a", 3)], "two sources are called 'a'"),
        ([Source("a", 1.0, (Task("7", "a"), Task("7", "a")))], "two tasks with id '7'"),
        ([source("a", 2, weight=0.0)], "weight 0.0"),
    ],
)
def test_sources_that_cannot_be_streamed_are_refused_by_name(sources: list[Source], message: str):
    with pytest.raises(ConfigError, match=message):
        SeededStream(sources, seed=0)


@pytest.mark.parametrize(("epoch", "index"), [(-1, 0), (0, -1), (0, 6)])
def test_a_position_outside_the_epoch_is_refused(epoch: int, index: int):
    with pytest.raises(ConfigError, match="an epoch has 5 positions"):
        SeededStream([source("a", 5)], seed=0).seek(epoch, index)


def test_shards_of_a_stream_have_every_position_once_also_from_any_position_on_and_across_epochs_of_odd_length():
    whole = take(SeededStream([source("a", 5)], seed=1), 30)
    shards = [SeededStream([source("a", 5)], seed=1, shard=(number, 3)) for number in range(3)]
    parts = [take(shard, 10) for shard in shards]
    assert parts == [whole[number::3] for number in range(3)]
    again = SeededStream([source("a", 5)], seed=1, shard=(1, 3))
    again.seek(0, 5)
    assert take(again, 3) == whole[7:16:3]
