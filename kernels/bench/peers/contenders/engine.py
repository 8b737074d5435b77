"""vLLM, imported once, with its compiled operators."""

from __future__ import annotations

import os
from types import ModuleType


def load() -> ModuleType:
    """The package. Raises ImportError where it, its operators or a GPU that it knows are missing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    import vllm._C_stable_libtorch
    import vllm._moe_C_stable_libtorch
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise ImportError(f"vLLM sees no NVIDIA GPU here, but {current_platform}")
    return vllm


def version() -> str:
    """From the package's metadata: what it says of itself needs files that a trimmed copy lacks."""
    from importlib.metadata import version as installed

    return installed("vllm")
