"""The small checkpoints, converted once for all loader tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.deployments import LAYOUTS, convert


@pytest.fixture(scope="session")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Converted checkpoint by name."""
    out = tmp_path_factory.mktemp("loaders")
    return {name: convert(checkpoints / name, out / name) for name in LAYOUTS}
