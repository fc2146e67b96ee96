"""Runs of keys of one version, against the version of each key."""

from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.embedded.key_runs import cut, joined, num_keys, oldest
from midflight.types import KeyRuns

versions = st.lists(st.integers(0, 2), max_size=9)


def runs_of(made_by: list[int]) -> KeyRuns:
    return joined([((version, 1),) for version in made_by])


@given(versions, versions, st.integers(0, 9), st.integers(0, 9))
def test_runs_are_cut_and_joined_as_the_keys_are(left: list[int], right: list[int], start: int, end: int) -> None:
    assert joined([runs_of(left), runs_of(right)]) == runs_of(left + right)
    assert cut(runs_of(left), start, end) == runs_of(left[start:end])
    assert num_keys(runs_of(left)) == len(left)
    if left:
        assert oldest(runs_of(left)) == min(left)
