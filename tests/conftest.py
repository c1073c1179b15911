"""Every jaxtyping signature of layerflow is checked by beartype while the tests run, and only then."""

from collections.abc import Iterator

import pytest
from jaxtyping import config, install_import_hook

install_import_hook("layerflow", "beartype.beartype")


@pytest.fixture
def untyped() -> Iterator[None]:
    """Signatures are not checked, as for a user: what is asked is layerflow's own answer to a wrong shape."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
