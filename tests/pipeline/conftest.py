"""One thread per operation: the matrices here are small, and threads that wait for each other only cost time."""

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
