"""What of the environment's options is refused before anything starts."""

import pytest

from midflight.config.load import load_config
from midflight.errors import ConfigError


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token"])
def test_an_option_of_the_template_that_the_gateway_sets_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.template_options.{name} is set by the gateway; leave it out"):
        load_config(None, [f'environment.template_options={{{name}="x"}}'])
    assert load_config(None, ["environment.template_options={enable_thinking=false}"]).environment.template_options
