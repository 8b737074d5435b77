"""The contenders: our kernels and the peers that are installed. One module each; all imports inside."""

from __future__ import annotations

from importlib import import_module

from bench.peers.contenders.base import Absent, Contender

#: Name -> module:class. Names are what results and targets use.
CONTENDERS = {
    "moeq": "bench.peers.contenders.ours:Ours",
    "marlin": "bench.peers.contenders.vllm_marlin:Marlin",
    "humming": "bench.peers.contenders.humming:Humming",
    "triton_kernels": "bench.peers.contenders.oai_triton:GivenChoices",
    "triton_kernels-own-routing": "bench.peers.contenders.oai_triton:OwnRouting",
    "vllm-triton": "bench.peers.contenders.vllm_triton:Triton",
    "vllm-cutlass": "bench.peers.contenders.vllm_cutlass:Cutlass",
    "vllm-cutlass-w4a8": "bench.peers.contenders.vllm_w4a8:CutlassW4A8",
    "deep_gemm": "bench.peers.contenders.deep_gemm:DeepGemm",
    "flashinfer": "bench.peers.contenders.flashinfer_cutlass:Bf16",
    "flashinfer-fp8": "bench.peers.contenders.flashinfer_cutlass:Fp8",
    "turbomind": "bench.peers.contenders.turbomind:TurboMind",
}

#: Which of them know a format.
BY_FORMAT = {
    "int4": ("moeq", "marlin", "humming", "vllm-triton", "turbomind"),
    "int8": ("moeq", "marlin", "humming", "vllm-triton"),
    "mxfp4": ("moeq", "marlin", "humming", "triton_kernels", "triton_kernels-own-routing", "flashinfer"),
    "mxfp4-silu": ("moeq", "marlin", "humming", "flashinfer", "turbomind"),
    "mxfp4-fp8": ("moeq", "humming", "flashinfer-fp8"),
    "int4-fp8": ("moeq", "humming", "vllm-cutlass-w4a8"),
    "w8a8": ("moeq", "humming", "vllm-triton"),
    "nvfp4": ("moeq", "marlin", "humming"),
    "fp8-block-w8a8": ("moeq", "humming", "vllm-triton", "deep_gemm"),
    "fp8-w8a8": ("moeq", "humming", "vllm-triton", "vllm-cutlass"),
    "fp8-block": ("moeq", "marlin", "humming"),
    "fp8": ("moeq", "marlin", "humming"),
}


def make(name: str) -> Contender:
    """The contender of that name. Raises Absent where what it runs is not installed."""
    module, _, kind = CONTENDERS[name].partition(":")
    try:
        contender: Contender = getattr(import_module(module), kind)()
    except ImportError as error:
        raise Absent(f"{type(error).__name__}: {error}") from error
    return contender


__all__ = ["BY_FORMAT", "CONTENDERS", "Absent", "Contender", "make"]
