"""vLLM, imported once, with its compiled operators."""

from __future__ import annotations

import os
from types import ModuleType


def load(deep_gemm: bool = False) -> ModuleType:
    """The package. Raises ImportError where it, its operators or a GPU that it knows are missing.

    deep_gemm: whether it may use its DeepGEMM. Scales of activations are never rounded to powers of two, which would
    be other numbers than those that are compared.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_USE_DEEP_GEMM"] = str(int(deep_gemm))
    os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
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
