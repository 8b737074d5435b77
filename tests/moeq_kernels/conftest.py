"""Where kernel tests run: on the GPU, or in Triton's interpreter (which tests/conftest.py has enabled)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def planned_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that interprets kernels specialise them, and give back what `launch_parameters` replaces."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from moeq_kernels import cuda, replay

    params = property(lambda kernel: JITFunction(kernel.fn, **kernel.kwargs).params)
    monkeypatch.setattr(InterpretedFunction, "params", params, raising=False)
    for module, names in (
        (cuda, ("driver", "load", "_THREAD")),
        (replay, ("graphs", "MAX_KEPT_GRAPHS", "MAX_KEPT_STREAMS")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
