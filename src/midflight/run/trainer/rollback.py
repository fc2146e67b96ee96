"""Falling back to an older checkpoint: `latest`, newer checkpoints and the store go back together.
The module imports torch.
"""

from pathlib import Path

from midflight.errors import ConfigError
from midflight.run.trainer.trainer_process import PublishedVersions
from midflight.trainer.folders import checkpoints, set_newest, verified, version_of
from midflight.trajectories.pairs import shard_folders, store_path
from midflight.trajectories.store import Store
from midflight.types import Version
from midflight.types.facts import Interrupted, WentBack


def roll_back(folder: Path, to: Version, *, run: str, store_folder: Path | None = None) -> int:
    """Goes back to the checkpoint of a version, and returns the number of groups that wait again.
    Raises `ConfigError` if there is no such checkpoint, or if it is not whole.

    The checkpoint is named first. A crash after that does no harm: a run that goes on rolls its
    store back to where its checkpoint is.
    """
    root = folder / "checkpoints"
    there = {version_of(found): found for found in reversed(checkpoints(root))}
    if to not in there:
        known = ", ".join(map(str, there)) or "none"
        raise ConfigError(
            f"rolling {folder} back to version {to}: there is no checkpoint of it. Those that "
            f"there are: {known}."
        )
    verified(there[to])
    set_newest(root, there[to])
    gateways = (folder, *shard_folders(folder))
    stores = [store_path(gateway, store_folder) for gateway in gateways]
    return sum(_stored_back(path, to, folder=folder, run=run) for path in stores)


def _stored_back(path: Path, to: Version, *, folder: Path, run: str) -> int:
    if not path.exists():  # on another machine, which goes on from the checkpoint's copy
        return 0
    store = Store(path, run=run)
    try:
        groups = store.groups_after(to, whole=False)
        goes_on = PublishedVersions(folder / "published").resumed_as(to)
        store.apply(Interrupted())
        store.apply(WentBack(to, goes_on, groups))
        return len(groups)
    finally:
        store.close()
