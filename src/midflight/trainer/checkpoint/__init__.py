"""Checkpoints: folders that are whole or absent. Safetensors and JSON, hashed in a manifest of ours; nothing is unpickled.

root/version-00000012/rank-00000.safetensors   what rank 0 holds of weights and optimiser, and its generators
                      rank-00001.safetensors   and rank 1, ...; any number of ranks can read them
                      state.json               version, steps, lineage, the store's cursor, format, number of ranks
                      manifest.json            hashes of all these
root/latest                                    name of the newest whole folder, written last
"""

from midflight.trainer.checkpoint.folders import latest_checkpoint, version_of
from midflight.trainer.checkpoint.load import load_checkpoint
from midflight.trainer.checkpoint.save import Staged, save_checkpoint, stage
from midflight.trainer.checkpoint.state import CheckpointState

__all__ = ["CheckpointState", "Staged", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "stage", "version_of"]
