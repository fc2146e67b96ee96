"""Property tests try the same examples in every run, so that a red run is a change's fault; `HYPOTHESIS_PROFILE=explore` tries new ones."""

import gc
import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell that starts the tests in its background lets them ignore interrupts, and with them every command that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(50_000)  # while all that the tests import is made, which stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now stays to the end: no collection need look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700)
