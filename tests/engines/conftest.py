"""The small checkpoints as vLLM reads them, and a device that suits every expert class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from load.deployments import convert


@pytest.fixture(scope="session")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those that vLLM reads, converted for it, by name."""
    from engines.vllm_engine import NAMES

    out = tmp_path_factory.mktemp("vllm")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in NAMES.items()}


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's buffers of a worker, on the CPU."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the device suits every expert class (some ask for it again beside the scheme)."""
    from engines.vllm_engine import BACKENDS

    for backend in (row for first in BACKENDS.values() for row in (first, *first.instead)):
        for kind in backend.classes():
            monkeypatch.setattr(kind, "_supports_current_device", staticmethod(lambda: True))
    for layout in ("int8-w8a8/1", "flashinfer-cutlass-nvfp4/1", "deepgemm-mxfp8/1", "deepgemm-fp8-sm90/1"):
        for kind in BACKENDS[layout].classes():
            monkeypatch.setattr(kind, "_supports_quant_scheme", staticmethod(lambda weight, activation: True))
