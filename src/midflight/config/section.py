"""The base of every section, and the kinds of numbers that options have. Nothing here imports
torch.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Frozen; unknown keys are refused by the loader, which knows the nearest one.

    The sentence under an option is its documentation; `reference` reads it from the source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
