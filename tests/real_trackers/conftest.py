"""These run in an environment that has the services' libraries and nothing of ours: what Midflight needs comes from the one it is developed in."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]
site.addsitedir(os.environ["MIDFLIGHT_PACKAGES"])
