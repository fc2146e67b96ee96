"""The configuration of a run: sections, loading, checks, and values derived from the options. It
never imports torch.
"""

from midflight.config.load import load_config
from midflight.config.sections import Config

__all__ = ["Config", "load_config"]
