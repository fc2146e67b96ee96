"""The configuration of a run: sections, loading, checks, and what follows from the numbers. Never
imports torch.
"""

from midflight.config.load import load_config
from midflight.config.sections import Config

__all__ = ["Config", "load_config"]
