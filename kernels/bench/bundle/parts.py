"""What the side-by-side run and `vllm serve` need where torch 2.11 and triton 3.6 are, and no network. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Files that belong together: an archive.

    Attributes:
        about: whose they are.
        wheels: requirements, each fetched without what it requires in turn.
        keep: patterns of the files taken from the wheels; all but `drop`.
        drop: patterns of files left out.
        libraries: patterns of files that go into the folder of libraries instead of the one of packages.
        cublas: whether to build a `libcublas.so.12` that passes calls on to CUDA 13's.
    """

    about: str
    wheels: tuple[str, ...]
    keep: tuple[str, ...] = ("*",)
    drop: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    cublas: bool = False


_VLLM = "vllm==0.26.0"  # the last for torch 2.11

#: In the order of what the most depends on.
PARTS = {
    "vllm": Part(
        "vLLM's operators: Marlin, CUTLASS",
        (_VLLM,),
        keep=(
            "vllm/_C_stable_libtorch.abi3.so",
            "vllm/_moe_C_stable_libtorch.abi3.so",
            "vllm/cumem_allocator.abi3.so",
            "vllm/fs_io_C.abi3.so",
            "vllm/spinloop.abi3.so",
        ),
    ),
    "flash-attention": Part(
        "vLLM's FlashAttention 3, for serving", (_VLLM,), keep=("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",)
    ),
    "python": Part(
        "vLLM's Python files and what it imports, Humming",
        (
            _VLLM, "humming-kernels==0.1.19", "xgrammar==0.2.3", "apache-tvm-ffi==0.1.11", "fastapi==0.136.3",
            "compressed-tensors==0.17.0", "openai-harmony==0.0.8", "msgspec==0.22.0", "llguidance==1.7.6",
            "pydantic==2.14.3", "pydantic-core==2.50.4", "partial-json-parser==0.2.1.1.post7", "annotated-types",
            "typing-inspection", "starlette", "uvicorn", "python-multipart", "watchfiles", "openai", "distro", "jiter",
            "sniffio", "httpx2", "httpcore2", "truststore", "idna", "anyio", "certifi", "h11", "pyzmq", "pybase64",
            "prometheus-fastapi-instrumentator", "model-hosting-container-standards", "jmespath", "mistral-common",
            "pydantic-extra-types", "pycountry", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py",
            "loguru", "cachetools", "cbor2", "blake3", "setproctitle", "typing-extensions",
        ),
        drop=(
            "vllm/*.so", "vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*",
            "vllm/third_party/flashmla/*", "vllm/third_party/tml_fa4/*", "*/static/swagger-ui*", "pycountry/locales/*",
            "xgrammar/*.a", "xgrammar/*.h",
        ),
    ),
    "deep_gemm": Part(
        "vLLM's DeepGEMM with the headers that it compiles",
        (_VLLM,),
        keep=("vllm/third_party/deep_gemm/*",),
        drop=("*cpython-310*", "*cpython-311*", "*cpython-313*", "*cpython-314*"),
    ),
    "turbomind": Part(
        "LMDeploy's TurboMind, and what of CUDA 12 it is linked against",
        ("lmdeploy==0.18.0", "nvidia-cuda-runtime-cu12==12.8.90"),
        keep=(
            "lmdeploy/turbomind/*.py", "lmdeploy/turbomind/_turbomind*.so", "lmdeploy/turbomind/lib/*",
            "lmdeploy-*/METADATA", "*/libcudart.so.12",
        ),
        libraries=("*/libcudart.so.12",),
        cublas=True,
    ),
    "flashinfer": Part(
        "FlashInfer's Python files and the sources of its SM90 module, to be compiled there",
        ("flashinfer-python==0.7.2", "nvidia-curand==10.4.5.25", "nvidia-cuda-nvrtc==13.0.88"),
        keep=(
            "flashinfer/*.py", "flashinfer/*.json", "flashinfer_python-*/METADATA",
            "flashinfer/data/include/*", "flashinfer/data/cccl/*", "flashinfer/data/cutlass/include/*",
            "flashinfer/data/cutlass/tools/util/include/*", "flashinfer/data/spdlog/include/*",
            "flashinfer/data/csrc/nv_internal/*", "flashinfer/data/csrc/fused_moe/*", "flashinfer/data/csrc/*.h",
            "nvidia/cu13/include/curand*", "nvidia/cu13/include/nvrtc*",
        ),
    ),
}  # fmt: skip

#: What FlashInfer's Python files import beside what the machine and `python` have.
PARTS["flashinfer-needs"] = Part(
    "packages that FlashInfer imports", ("nvidia-ml-py", "tabulate", "click", "einops", "ninja"), drop=("bin/*",)
)
