"""A cluster, and fast paths for matrices that are too small for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


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
