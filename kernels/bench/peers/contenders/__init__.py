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
    "deep_gemm": "bench.peers.contenders.deep_gemm:DeepGemm",
}

#: Peers that have not been run, and why: no result includes them.
NOT_RUN = {
    "FlashInfer SM90 CUTLASS MXFP4 (0.7.2)": (
        "no contender is written: its kernels are compiled beside the GPU, by nvcc and ninja, from sources in its wheel"
    ),
    "LMDeploy TurboMind int4 and MXFP4 (0.18)": (
        "no contender is written: `LlamaLinear.forward_moe` belongs to a compiled extension, which no CPU loads"
    ),
    "vLLM's CUTLASS W4A8": (
        "no contender is written: its operator multiplies int4 weights with e4m3 activations, which no kernel here does"
    ),
}

#: Which of them know a format.
BY_FORMAT = {
    "int4": ("moeq", "marlin", "humming", "vllm-triton"),
    "int8": ("moeq", "marlin", "humming", "vllm-triton"),
    "mxfp4": ("moeq", "marlin", "humming", "triton_kernels", "triton_kernels-own-routing"),
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


__all__ = ["BY_FORMAT", "CONTENDERS", "NOT_RUN", "Absent", "Contender", "make"]
