"""Compiling and loading a layer's kernels inside an engine, and saying in its log what they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeq_kernels import PreparedLayer

#: Layers whose kernels are compiled and loaded: layers that are alike share them.
_READY: set[Any] = set()


def make_ready(prepared: PreparedLayer, logger: logging.Logger) -> None:
    """Compile, in parallel, and load all kernels of a layer, and log once for every kind of layer what they are."""
    from moeq_kernels.compiling import cache_folder

    if (key := (prepared.problem, prepared.max_tokens, prepared.device)) in _READY:
        return
    done = prepared.warm()
    _READY.add(key)
    if not done.kept:
        logger.warning("moeq: kernels are compiled at every start: %s cannot be written", cache_folder())
    logger.info("moeq: %s: %d kernels, %d compiled, %.1f s", prepared, done.kernels, done.compiled, done.seconds)


__all__ = ["make_ready"]
