"""Station 4: trajectories become groups, groups become packed batches, and all of it is durable."""

from midflight.trajectories.groups import collect, tokens_without_reward
from midflight.trajectories.packing import from_bytes, pack, to_bytes
from midflight.trajectories.recovery import Recovered, Unfinished
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter

__all__ = ["Recovered", "Store", "StoreWriter", "Unfinished", "collect", "from_bytes", "pack", "to_bytes", "tokens_without_reward"]
