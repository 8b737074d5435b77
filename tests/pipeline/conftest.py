"""Settings of these tests: one thread per operation, since the matrices are small and waiting threads cost time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster with two nodes that work, for all tests that need one: it takes seconds to start."""
    pytest.importorskip("ray")
    from pipeline.ray_nodes import running

    with running(2) as found:
        yield found


@pytest.fixture
def fast_paths_for_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.layouts.words.COMPILED_FROM", 0)
