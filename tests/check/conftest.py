"""Conversions of the small checkpoints, made once per session and never changed by a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import moeq
from moeq.pipeline.convert import convert

Convert = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def conversions(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """`conversions(checkpoint, layout)`: folder of that conversion."""
    folder, done = tmp_path_factory.mktemp("conversions"), {}

    def converted(name: str, layout: str) -> Path:
        if (name, layout) not in done:
            target = folder / f"{name}-{layout.replace('/', '-')}"
            convert(checkpoints / name, target, moeq.Deployment(gpu=moeq.gpu("H100")), layout=layout, force_layout=True)
            done[name, layout] = target
        return done[name, layout]

    return converted
