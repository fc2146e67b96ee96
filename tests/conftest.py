"""Property tests try the same examples in every run, so that a red run is a change's fault; `HYPOTHESIS_PROFILE=explore` tries new ones."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
