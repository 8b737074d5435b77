"""Which model classes of vLLM run their experts through `RoutedExperts`, and so can be served converted.

Run by `python tools/extract.py models 0.33.0 --site SITE`. Every registered class is imported as on an H100, and the
code that builds its layers is followed from class to class: what a constructor names and its module knows. The result
is one version's part of `tools/pages/vllm_models.json`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from moeq.oracle.versions import release
from vllm_tables import names, sandbox

#: Packages that model classes import for images, sound and kernels: pretended even where they are installed, since
#: nothing of theirs says how experts are built.
_PRETENDED = ("torchvision", "torchaudio", "timm", "terratorch", "cutlass", "flashinfer", "librosa", "av")
#: Compiled operators that passes and layers look up when they are imported or made.
_OPERATORS = (
    *("rotary_embedding", "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant"),
    *("silu_and_mul_with_clamp", "situ_and_mul", "rms_norm", "fused_add_rms_norm", "rms_norm_static_fp8_quant"),
    *("fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"),
    *("fused_qk_norm_rope", "silu_and_mul_quant", "silu_and_mul_per_block_quant"),
)
#: Trees of model classes.
TREES = ("vllm.model_executor.models", "vllm.models")
#: Words in a class's name that say it has experts.
WORDS = ("moe", "expert")
#: Words in the name of a part of a model whose family has experts elsewhere.
OTHER_PARTS = ("attention", "audio", "vision")


class Idle:
    """A stream or event of CUDA that does nothing."""

    def __init__(self, *values: Any, **named: Any) -> None: ...


def install(site: str) -> None:
    """Import vLLM from `site` as on an H100 whose tensors are on the CPU. Once a process."""
    sandbox._COMPILED += ("vllm.third_party.deep_gemm", "vllm.third_party.deep_gemm._C")
    sys.meta_path.insert(0, sandbox._Finder({"xgrammar"}))
    sandbox.preload()  # transformers looks at the version of torchvision
    sys.meta_path.insert(0, sandbox._Finder(set(_PRETENDED)))
    sandbox.install(site, {"kind": "cuda", "cap": (9, 0), "flags": {}, "env": {}})
    import torch
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.device_type = "cpu"
    platform.current_device = classmethod(lambda cls: torch.device("cpu"))
    define_operators()
    names.prepare()
    torch.cuda.Event = torch.cuda.Stream = Idle  # type: ignore[assignment,misc]


def define_operators() -> None:
    """Declare the compiled operators of `_OPERATORS`, without implementations."""
    import torch

    make: Any = torch.library.Library
    names._libraries.append(make("_C", "FRAGMENT"))
    for name in _OPERATORS:
        names._libraries[-1].define(f"{name}(Tensor(a!) out) -> ()")


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of everything defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def named(function: FunctionType, makers: Mapping[str, Any]) -> Iterator[Any]:
    """What a function's code names and its module knows, attributes of modules too, and what arguments default to.

    `makers` are known wherever they are imported from.
    """
    yield from [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = sorted({name for code in codes(function.__code__) for name in code.co_names})
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from known
    yield from (makers[name] for name in names if name in makers)
    for module in known:
        if isinstance(module, ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))


def functions(value: Any) -> Iterator[FunctionType]:
    """A function, those inside its wrappers, and those that its arguments default to."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return
    yield value
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
    for inner in [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]:
        yield from functions(inner)


def follow(start: type) -> tuple[str, str]:
    """How a class gets its experts, and the class that does it.

    `yes`: they are RoutedExperts, whose method the config chooses; `inside`: those of the model it wraps may be (a
    vision model builds its language model by name); `own`: it has experts of its own making; `no`: none.
    """
    from vllm.model_executor.layers.fused_moe import layer
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    # The function that builds a layer's experts, by the engine's version.
    makers = {name: found for name in ("FusedMoE", "FusedMoEFactory") if (found := getattr(layer, name, None))}
    choice = RoutedExperts._get_quant_method if hasattr(RoutedExperts, "_get_quant_method") else None
    waiting, seen, inside, own = [start], {start}, False, ""
    while waiting:
        kind = waiting.pop()
        for owner in inspect.getmro(kind):
            if not owner.__module__.startswith(TREES):
                continue
            builders = [inner for value in vars(owner).values() for inner in functions(value)]
            things = [
                thing for builder in builders if builder.__name__ != "load_weights" for thing in named(builder, makers)
            ]
            for thing in [value for value in vars(owner).values() if isinstance(value, type)] + things:
                if isinstance(thing, type) and issubclass(thing, RoutedExperts):
                    ignores = choice is not None and getattr(thing, "_get_quant_method", None) is not choice
                    return ("own", thing.__name__) if ignores else ("yes", owner.__name__)
            for thing in things:
                if any(thing is maker for maker in makers.values()):
                    return "yes", owner.__name__
                inside |= getattr(thing, "__name__", "") == "init_vllm_registered_model"
                modelled = str(getattr(thing, "__module__", "")).startswith(TREES)
                if isinstance(thing, type) and modelled and thing not in seen:
                    seen.add(thing)
                    waiting.append(thing)
                    name = thing.__name__.lower()
                    if any(word in name for word in WORDS) and not any(word in name for word in OTHER_PARTS):
                        own = thing.__name__
    if inside:
        return "inside", "the model that it wraps"
    return ("own", own) if own else ("no", "")


def extract(version: str, site: str) -> dict[str, dict[str, str]]:
    """How every registered class of the version in `site` gets its experts: `yes`, `own` and `unknown` with a reason.

    Classes without experts, and those that wrap a model, are left out.
    """
    install(site)
    from vllm.model_executor.models.registry import ModelRegistry

    found: dict[str, dict[str, str]] = {"yes": {}, "own": {}, "unknown": {}}
    for architecture, model in sorted(ModelRegistry.models.items()):
        try:
            kind, why = follow(model.load_model_cls())
        except Exception as error:  # noqa: BLE001 - whatever an import lacks is the answer
            kind, why = "unknown", f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if kind in found:
            found[kind][architecture] = why
    return found


def merged(known: Mapping[str, Any], version: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The data file with a version's classes in it."""
    return {name: {**known, version: found}[name] for name in sorted({*known, version}, key=release)}
