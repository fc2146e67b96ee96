"""The nouns that cross from one station to another: frozen, slotted, without behaviour beyond what they can derive."""

from midflight.types.engines import Attestation, Capabilities, Delta, EngineHealth, TensorSpec, WeightManifest
from midflight.types.generation import Chunk, Finish, GenerateRequest, Segment, Turn
from midflight.types.names import (
    Bool,
    Fate,
    Feature,
    FinishReason,
    Float32,
    GrammarKind,
    Int32,
    Json,
    LogprobKind,
    PauseMode,
    Reason,
    StalePolicy,
    Version,
)
from midflight.types.rollouts import Batch, Group, GroupKey, PackedBatch, RolloutKey, Row, SessionRecord, Task, Trajectory
from midflight.types.sampling import Grammar, SamplingParams

__all__ = [
    "Attestation",
    "Batch",
    "Bool",
    "Capabilities",
    "Chunk",
    "Delta",
    "EngineHealth",
    "Fate",
    "Feature",
    "Finish",
    "FinishReason",
    "Float32",
    "GenerateRequest",
    "Grammar",
    "GrammarKind",
    "Group",
    "GroupKey",
    "Int32",
    "Json",
    "LogprobKind",
    "PackedBatch",
    "PauseMode",
    "Reason",
    "RolloutKey",
    "Row",
    "SamplingParams",
    "Segment",
    "SessionRecord",
    "StalePolicy",
    "Task",
    "TensorSpec",
    "Trajectory",
    "Turn",
    "Version",
    "WeightManifest",
]
