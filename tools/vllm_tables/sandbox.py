"""vLLM's own package, importable without its compiled parts and on a device that is not there.

For the extractor and the differential test only: it needs torch and vLLM's Python tree, and nothing of moeq imports it.
Only what surrounds a decision is faked: absent packages, compiled modules, device probes and compiled predicates.
A world is a plain dict: `kind` (`cuda`, `rocm`, `xpu`, `cpu`), `cap` or `gcn` or `arch`, `flags` (packages), `env`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

World = Mapping[str, Any]

# Imported on the way to the decision code and not needed there; faked where absent.
_OPTIONAL = [
    "vllm_xpu_kernels",
    "openai_harmony",
    "mcp",
    "anthropic",
    "xgrammar",
    "llguidance",
    "outlines_core",
    "lmformatenforcer",
    "mistral_common",
    "cv2",
    "ijson",
    "depyf",
    "opentelemetry",
    "tilelang",
    "numba",
    "model_hosting_container_standards",
    "sentencepiece",
    "tokenspeed_mla",
    "watchfiles",
    "fastsafetensors",
    "prometheus_fastapi_instrumentator",
    "uvloop",
    "lark",
    "nvtx",
    "quack",
    "instanttensor",
    "soundfile",
    "librosa",
    "soxr",
    "cuda",
    "tabulate",
    "openai",
    "fastapi",
    "starlette",
    "aiohttp",
    "tiktoken",
    "prometheus_client",
    "pybase64",
    "cbor2",
    "orjson",
    "msgspec_ext",
    "blake3",
    "cpuinfo",
    "partial_json_parser",
    "setproctitle",
    "pythonjsonlogger",
    "ninja",
    "multidict",
    "oss_harmony",
]
_FORCED = {"vllm_xpu_kernels", "numba", "librosa", "soxr", "cuda"}
_COMPILED: tuple[str, ...] = (
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
)
# Compiled predicates: capability -> whether the shipped binaries hold such a kernel (read from their code objects).
_PREDICATES = {
    "cutlass_scaled_mm_supports_block_fp8": lambda c: c >= 90,
    "cutlass_scaled_mm_supports_fp8": lambda c: c >= 89,
    "cutlass_scaled_mm_supports_fp4": lambda c: c >= 100,
    "cutlass_group_gemm_supported": lambda c: 90 <= c < 110,
    "mxfp4_experts_quant_supported": lambda c: 100 <= c < 120,
}
#: Optional packages whose probes are answered.
PACKAGES = ("flashinfer", "triton_kernels", "deep_gemm", "humming", "quark", "hpc", "b12x", "aiter", "flydsl")
#: What a platform's wheel brings.
DEFAULT_PACKAGES = {
    "cuda": {"flashinfer": True, "triton_kernels": True, "deep_gemm": True, "humming": True},
    "rocm": {"triton_kernels": True},
    "xpu": {},
    "cpu": {},
}
_KEPT = {"VLLM_LOGGING_LEVEL", "VLLM_TARGET_DEVICE"}

_B12X = types.SimpleNamespace(is_supported=lambda: True)

_flags: dict[str, bool] = {}  # of the current world; the probes below look at it
_libraries: list[Any] = []  # operator definitions live as long as these
_world: dict[str, Any] = {}  # the current device


# ------------------------------------------------------------------------------------------------ absent packages


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = _fake_class(name)
        setattr(cls, name, made)
        return made

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return other


def _fake_class(name: str) -> Any:
    def schema(cls: Any, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return _Anything(
        name,
        (),
        {
            "__init__": lambda self, *a, **k: None,
            "__class_getitem__": classmethod(lambda cls, item: cls),
            "__get_pydantic_core_schema__": classmethod(schema),
        },
    )


class _FakeModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = _fake_class(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _FakeModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def _fake_packages() -> None:
    absent = {name for name in _OPTIONAL if name in _FORCED or importlib.util.find_spec(name) is None}
    sys.meta_path.append(_Finder(absent))
    for name in _COMPILED:
        module = _FakeModule(name)
        module.__path__ = []
        sys.modules[name] = module


# ------------------------------------------------------------------------------------------------ the device


def _define_operators(world: World) -> None:
    import torch

    make: Any = torch.library.Library

    def library(name: str) -> Any:
        _libraries.append(make(name, "FRAGMENT"))
        return _libraries[-1]

    compiled = library("_C")
    for name, rule in _PREDICATES.items():
        compiled.define(f"{name}(int c) -> bool")
        compiled.impl(name, rule, "CompositeExplicitAutograd")
    if world["kind"] == "rocm" and "gfx1100" in world["gcn"]:
        library("_rocm_C").define("moe_gptq_gemm_rdna3(Tensor a) -> Tensor")
    if world["kind"] == "cpu" and world["arch"] in ("arm", "power"):
        compiled.define("cpu_fused_moe_int8(Tensor a) -> Tensor")
    if world.get("zen"):
        zen = library("zentorch")
        zen.define("zentorch_fused_moe(Tensor a) -> Tensor")
        zen.define("zentorch_woq_repack_weight(Tensor a) -> Tensor")
        zen.define("zentorch_is_fp16_supported() -> bool")
        zen.impl("zentorch_is_fp16_supported", lambda: False, "CompositeExplicitAutograd")


def _become(cls: Any) -> None:
    import vllm.platforms as platforms

    instance = cls()
    platforms.__dict__["_current_platform"] = instance
    platforms.__dict__["current_platform"] = instance


def _plain_platform(world: World) -> Any:
    """A platform of the right kind and nothing else, for modules that ask while the real class is being imported."""
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    kind = world["kind"]
    capability = DeviceCapability(*world["cap"]) if world.get("cap") else None
    return type(
        "Plain",
        (Platform,),
        {
            "_enum": getattr(PlatformEnum, kind.upper()),
            "device_name": kind,
            "device_type": "cuda" if kind == "rocm" else kind,
            "dispatch_key": "CUDA" if kind == "rocm" else kind.upper(),
            "get_device_capability": classmethod(lambda cls, device_id=0: capability),
            "get_device_name": classmethod(lambda cls, device_id=0: kind),
            "supports_fp8": classmethod(
                lambda cls: kind == "xpu" or (capability is not None and capability.to_int() >= 89)
            ),
        },
    )


def _cuda(world: World) -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    # The capability is looked up: one import serves every CUDA device (see `change_device`).
    return type(
        "Cuda",
        (NonNvmlCudaPlatform,),
        {
            "device_name": "cuda",
            "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(*_world["cap"])),
            "get_device_name": classmethod(lambda cls, device_id=0: "sm{}{}".format(*_world["cap"])),
            "num_compute_units": classmethod(lambda cls, device_id=0: 132),
        },
    )


def _rocm(world: World) -> Any:
    import torch

    torch.cuda.get_device_properties = lambda *a, **k: types.SimpleNamespace(  # type: ignore[assignment]
        gcnArchName=_world["gcn"], multi_processor_count=304
    )
    from vllm.platforms import rocm
    from vllm.platforms.interface import DeviceCapability

    return type(
        "Rocm",
        (rocm.RocmPlatform,),
        {
            "device_name": world["gcn"],
            "get_device_capability": classmethod(
                lambda cls, device_id=0: DeviceCapability(*rocm._capability_from_gcn_arch(_world["gcn"]))
            ),
            "get_device_name": classmethod(lambda cls, device_id=0: _world["gcn"]),
        },
    )


def _other_gfx() -> None:
    """Work out again what vLLM's ROCm platform works out once: which GPU it is, and of which kinds."""
    from vllm.platforms import rocm

    names = vars(rocm)
    names["_GCN_ARCH"] = _world["gcn"]
    for statement in ast.parse(inspect.getsource(rocm)).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id.startswith("_ON_") for target in targets):
            exec(compile(ast.Module([statement], []), rocm.__file__, "exec"), names)
    for value in list(names.values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _xpu(world: World) -> Any:
    from vllm.platforms.xpu import XPUPlatform

    return type(
        "Xpu",
        (XPUPlatform,),
        {
            "device_name": "xpu",
            "get_device_capability": classmethod(lambda cls, device_id=0: None),
            "get_device_name": classmethod(lambda cls, device_id=0: "xpu"),
            "is_data_center_gpu": classmethod(lambda cls: True),
        },
    )


def _cpu(world: World) -> Any:
    import torch
    from vllm.platforms.interface import CpuArchEnum

    module, name = ("zen_cpu", "ZenCpuPlatform") if world.get("zen") else ("cpu", "CpuPlatform")
    base = getattr(importlib.import_module(f"vllm.platforms.{module}"), name)
    arches = {"x86": CpuArchEnum.X86, "arm": CpuArchEnum.ARM, "power": CpuArchEnum.POWERPC}
    torch.cpu._is_amx_tile_supported = lambda: bool(_world.get("amx"))
    members = {
        "get_cpu_architecture": classmethod(lambda cls: arches[_world["arch"]]),
        "get_device_capability": classmethod(lambda cls, device_id=0: None),
    }
    return type("Cpu", (base,), members)


_PLATFORMS = {"cuda": _cuda, "rocm": _rocm, "xpu": _xpu, "cpu": _cpu}


def install(site: str, world: World) -> None:
    """Make the tree in `site` importable as `vllm` on the world's device. Once a process, before any import of it."""
    sys.path.insert(0, os.path.abspath(site))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    _fake_packages()
    _set_flags(world)
    _world.update(world)
    _define_operators(world)
    _become(_plain_platform(world))
    _become(_PLATFORMS[world["kind"]](world))
    _answer_probes()


def change_device(world: World) -> None:
    """Another device of the same platform in the same process (in a fork of its own: predicates cache)."""
    _world.clear()
    _world.update(world)
    if world["kind"] == "rocm":
        _other_gfx()


#: What vLLM imports from elsewhere: the larger part of an import, and the same on every device.
_HEAVY = (
    "torch._inductor.lowering",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "compressed_tensors.quantization",
    "aiohttp",
    "openai.types.responses.response_function_tool_call_output_item",
    "fastapi",
    "zmq",
    "prometheus_client",
)


def preload() -> None:
    """Import what every fork needs before there are forks."""
    for name in _HEAVY:
        with contextlib.suppress(Exception):  # another version of it, or none: vLLM's own import says so
            importlib.import_module(name)


# ------------------------------------------------------------------------------------------------ packages, variables


def _set_flags(world: World) -> None:
    _flags.clear()
    _flags.update({name: False for name in PACKAGES})
    _flags.update(DEFAULT_PACKAGES[world["kind"]])
    _flags.update(world.get("flags", {}))


def _answer_probes() -> None:
    """Package probes look at the world. Before the modules that import the probes by name."""
    import vllm.utils.flashinfer as flashinfer
    import vllm.utils.import_utils as probes

    def answer(module: Any, probe: str, package: str) -> None:
        if hasattr(module, probe):
            setattr(module, probe, lambda *a, **k: _flags[package])

    for package in ("triton_kernels", "humming", "quark", "deep_gemm", "hpc", "aiter"):
        answer(probes, f"has_{package}", package)
    if hasattr(probes, "get_triton_kernels_version"):
        probes.get_triton_kernels_version = lambda: None
    for name in dir(flashinfer):
        if name.startswith("has_"):
            answer(flashinfer, name, "flashinfer")
    for name, package in (("hpc", "hpc"), ("b12x", "b12x")):
        if importlib.util.find_spec(f"vllm.utils.{name}") is None:
            continue
        module: Any = importlib.import_module(f"vllm.utils.{name}")
        answer(module, f"has_{name}", package)
        if name == "b12x":
            module.get_b12x_fused_moe = lambda: _B12X if _flags["b12x"] else None


def _humming_device() -> None:
    """Humming asks the driver for the device itself: answer for it."""
    if _world["kind"] != "cuda" or importlib.util.find_spec("humming") is None:
        return
    major, minor = _world["cap"]
    importlib.import_module("torch").cuda.get_device_capability = lambda *a: (major, minor)  # before 0.1.16
    schema: Any = importlib.import_module("humming.schema.humming")
    if hasattr(schema, "current_device"):
        schema.current_device = type("Device", (), {"sm_version": major * 10 + minor, "is_ppu": False})()


def apply(world: World) -> None:
    """Set the packages and variables of a world, and forget cached answers."""
    _set_flags(world)
    for name in [name for name in os.environ if name.startswith("VLLM_") and name not in _KEPT]:
        del os.environ[name]
    os.environ.update(world.get("env", {}))
    _humming_device()
    import vllm._aiter_ops as aiter

    aiter.IS_AITER_FOUND = _flags["aiter"]
    aiter.rocm_aiter_ops.refresh_env_variables()
    for name in ("fused_moe_supports_gate_mode", "fused_moe_supports_quant_dtype_a"):
        if hasattr(aiter.rocm_aiter_ops, name):
            setattr(aiter.rocm_aiter_ops, name, classmethod(lambda cls: bool(cls.is_enabled())))
