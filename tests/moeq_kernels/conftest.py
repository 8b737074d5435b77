"""Kernel tests run in Triton's interpreter where there is no GPU; the choice must be made before triton is imported."""

from __future__ import annotations

import pytest
import torch

from moeq_kernels import interpreter

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    interpreter.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
