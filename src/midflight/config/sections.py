"""The configuration of a run: a section for each station. Each section stands in a file with its
checks. Every option has a type, a bound, a unit and a sentence that says what larger means.

Nothing here imports torch. Code receives the numbers that it needs, not these objects.
"""

from midflight.config.cluster import ClusterSection
from midflight.config.engine import EngineSection
from midflight.config.environment import EnvironmentSection
from midflight.config.evaluation import EvaluationSection
from midflight.config.gateway import GatewaySection
from midflight.config.loss import (
    CorrectionSection,
    CriticSection,
    DistillationSection,
    ObjectiveSection,
)
from midflight.config.model import LoraSection, ModelSection
from midflight.config.observe import ObserveSection
from midflight.config.rollout import RolloutSection
from midflight.config.run import RunSection
from midflight.config.section import Section
from midflight.config.sources import CurriculumSection
from midflight.config.trainer import TrainerSection, WarmStartSection
from midflight.config.weights import WeightsSection


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    gateway: GatewaySection = GatewaySection()
    environment: EnvironmentSection = EnvironmentSection()
    curriculum: CurriculumSection = CurriculumSection()
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    trainer: TrainerSection = TrainerSection()
    objective: ObjectiveSection = ObjectiveSection()
    correction: CorrectionSection = CorrectionSection()
    critic: CriticSection = CriticSection()
    lora: LoraSection = LoraSection()
    distillation: DistillationSection = DistillationSection()
    warm_start: WarmStartSection = WarmStartSection()
    weights: WeightsSection = WeightsSection()
    observe: ObserveSection = ObserveSection()
    cluster: ClusterSection = ClusterSection()
