"""What every engine port must do. One text for the scripted engine, the embedded one (in process, over its wire, behind the relay)
and real servers. What not every engine can do is asked of its capabilities, never of its name.

A subclass gives `attached`: a context in which an engine decodes, with what it is expected to say.
"""

from tests.engines.contract_generation import GenerationContract
from tests.engines.contract_pauses import PauseContract
from tests.engines.contract_seeds import SeedContract
from tests.engines.contract_weights import WeightContract


class EngineContract(GenerationContract, PauseContract, WeightContract, SeedContract):
    pass
