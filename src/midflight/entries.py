"""Imports of objects that a configuration names as `module:name`, such as a user's environment or
loss, and of optional packages.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from midflight.errors import ConfigError, nearest

ENTRY = re.compile(r"[\w.]+:\w+")


def load_entry(entry: str, *, option: str, such_as: str) -> object:
    """The object at `module:name`. The current folder is searched too. Raises `ConfigError` that
    names the option and says how to correct it.
    """
    module_name, separator, attribute = entry.partition(":")
    if not (module_name and separator and attribute):
        raise ConfigError(
            f"{option} is {entry!r}, expected `module:function`, such as {such_as!r}."
        )
    module = _import(module_name, f"{option} is {entry!r}")
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        if isinstance(error, ConfigError):
            raise
        known = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        ]
        raise ConfigError(
            f"{option} is {entry!r}, but {module_name} has no "
            f"{attribute!r}.{nearest(attribute, known)}"
        ) from None


def _import(module_name: str, said: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except SystemExit as error:
        raise ConfigError(
            f"{said}: importing {module_name} ends its process with sys.exit({error.code!r}), as a "
            "script does; put that below `if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        missing = (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module_name}.".startswith(f"{error.name}.")
        )
        if missing:
            remedy = (
                f"there is no module {cast(ModuleNotFoundError, error).name!r} here or among "
                "the installed packages; check the spelling, or run from its folder"
            )
        else:
            remedy = (
                f"importing {module_name} failed with {type(error).__name__}: {error}; mend "
                "that module first"
            )
        raise ConfigError(f"{said}: {remedy}.") from error


def package(name: str, *, extra: str) -> Any:
    """The package of that name. Raises `ConfigError` that names the extra which installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name and not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"importing {name} failed: {error}; install what it needs with: pip install "
                f"'midflight[{extra}]'."
            ) from error
        raise ConfigError(
            f"this environment needs the package {name}; install it with: pip install "
            f"'midflight[{extra}]'."
        ) from error
