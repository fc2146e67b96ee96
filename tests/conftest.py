"""Property tests try the same examples in every run, so that a red run is a change's fault; `HYPOTHESIS_PROFILE=explore` tries new ones."""

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

gc.set_threshold(50_000)  # while all that the tests import is made, which stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now stays to the end: no collection need look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700)
