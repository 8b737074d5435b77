"""A GPU that is not there: tensors that say that they are on one, and a stream that tells what it was asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class OnGpu(torch.Tensor):
    """Memory of the host that passes for a GPU's: what is copied into it can be read."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


class Stream:
    """The caller's stream: it notes when copies are awaited, and `told` has what else happens between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.pinned: set[bool] = set()
        empty = torch.empty

        def allocated(*sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
            self.pinned.add(pin_memory)
            return empty(*sizes, **settings)

        def entered(stream: Stream | None) -> AbstractContextManager[None]:
            self.told.append("entered" if stream is self else "no stream")
            return nullcontext()

        monkeypatch.setattr(torch, "empty", allocated)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", entered)

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self.told.append("waited"))
