"""Contenders: our kernels and the peers that are installed, one module each. Making one imports the peer."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from support.cases import Routed
from torch import Tensor

from bench.peers.problem import Problem

#: Name -> module:class. Names are what results and targets use.
CONTENDERS = {
    "moeq": "bench.peers.contenders.ours:Ours",
    "marlin": "bench.peers.contenders.vllm_marlin:Marlin",
    "humming": "bench.peers.contenders.humming:Humming",
    "triton_kernels": "bench.peers.contenders.oai_triton:GivenChoices",
    "triton_kernels-own-routing": "bench.peers.contenders.oai_triton:OwnRouting",
    "vllm-triton": "bench.peers.contenders.vllm_triton:Triton",
    "vllm-cutlass": "bench.peers.contenders.vllm_cutlass:Cutlass",
    "vllm-cutlass-w4a8": "bench.peers.contenders.vllm_cutlass:CutlassW4A8",
    "deep_gemm": "bench.peers.contenders.deep_gemm:DeepGemm",
    "flashinfer": "bench.peers.contenders.flashinfer_cutlass:Bf16",
    "flashinfer-fp8": "bench.peers.contenders.flashinfer_cutlass:Fp8",
}

#: Which of them know a format.
BY_FORMAT = {
    "int4": ("moeq", "marlin", "humming", "vllm-triton"),
    "int8": ("moeq", "marlin", "humming", "vllm-triton"),
    "mxfp4": ("moeq", "marlin", "humming", "triton_kernels", "triton_kernels-own-routing", "flashinfer"),
    "mxfp4-silu": ("moeq", "marlin", "humming", "flashinfer"),
    "mxfp4-fp8": ("moeq", "humming", "flashinfer-fp8"),
    "int4-fp8": ("moeq", "humming", "vllm-cutlass-w4a8"),
    "w8a8": ("moeq", "humming", "vllm-triton"),
    "nvfp4": ("moeq", "marlin", "humming"),
    "fp8-block-w8a8": ("moeq", "humming", "vllm-triton", "deep_gemm"),
    "fp8-w8a8": ("moeq", "humming", "vllm-triton", "vllm-cutlass"),
    "fp8-block": ("moeq", "marlin", "humming"),
    "fp8": ("moeq", "marlin", "humming"),
}


class Absent(Exception):
    """A contender's packages are not installed."""


class Contender(ABC):
    """A library that computes a MoE layer; its constructor imports the library, or raises ImportError.

    Attributes:
        versions: packages and their versions.
        factor: largest error over that of plain bf16 arithmetic; a larger one is wrong. Peers round more often (the
            first product, every choice before the sum), which costs up to 2.5 times.
    """

    versions: dict[str, str]
    factor = 3.0

    @abstractmethod
    def prepare(self, problem: Problem) -> Any:
        """Pack the weights as the kernels read them. This is not timed."""

    def inputs(self, weights: Any, routed: Routed) -> Any:
        """Round up and convert a call's inputs as the kernels read them. This is not timed."""
        return routed

    @abstractmethod
    def run(self, weights: Any, inputs: Any) -> Tensor:
        """Return y `[M, hidden or more]`. This is timed."""

    def duplicate(self, weights: Any) -> Any:
        """Copy the weights to other memory."""
        return copy.deepcopy(weights)

    def about(self, weights: Any, inputs: Any) -> str:
        """Say in a few words what runs."""
        return ""


def widened(x: Tensor, hidden: int) -> Tensor:
    """Pad x with columns of zeros."""
    return x if x.shape[1] == hidden else torch.nn.functional.pad(x, (0, hidden - x.shape[1])).contiguous()


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def make(name: str) -> Contender:
    """Make the contender of that name. Raises Absent where its packages are not installed."""
    module, _, kind = CONTENDERS[name].partition(":")
    try:
        contender: Contender = getattr(import_module(module), kind)()
    except ImportError as error:
        raise Absent(f"{type(error).__name__}: {error}") from error
    return contender


def load_vllm(deep_gemm: bool = False) -> ModuleType:
    """Import vLLM with its compiled operators.

    Its DeepGEMM is used only where `deep_gemm` says so. Scales of activations are never rounded to powers of two, since
    that would change the numbers that are compared.

    Raises:
        ImportError: vLLM, its operators or a GPU that it knows are missing.
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


def vllm_version() -> str:
    """Return vLLM's version from its metadata; its own attribute needs files that a trimmed copy lacks."""
    from importlib.metadata import version as installed

    return installed("vllm")
