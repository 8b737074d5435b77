"""Where kernel tests run: on the GPU, or in Triton's interpreter (which tests/conftest.py has enabled)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
