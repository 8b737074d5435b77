"""Input of a config reader, and the checks and keys that all readers share.

A reader turns one `quantization_config` into the `Method` that asks for a backend, or raises `ConfigRefusal` if vLLM
refuses the config. It reads the config alone: no tensors, no torch. Rules that differ between versions ask
`policy.since`. The readers are in the modules of this package; `entry_points.READERS` maps methods to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from moeq.oracle.engines.vllm.case import INTEGER_VARIABLES, Case, Method, is_integer
from moeq.oracle.engines.vllm.filters import marlin_shape
from moeq.oracle.engines.vllm.linears import HEAD, linears_of, renamings
from moeq.oracle.engines.vllm.policy import EnginePolicy

Config = Mapping[str, Any]

#: Usual module path that per-module rules are matched against: the engine sees a layer's experts as one module.
PREFIX = "model.layers.0.mlp.experts"


class ConfigRefusal(Exception):
    """Refusal of a config before any backend is considered; `error` is the type of the engine's exception."""

    def __init__(self, error: str, kind: str, text: str, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.error, self.kind, self.text, self.hint, self.code = error, kind, text, hint, code


@dataclass(frozen=True)
class ConfigQuestion:
    """Input of a reader: the config, and a case (`probe`) whose method is still open."""

    config: Config
    probe: Case
    prefix: str = PREFIX  #: module path of the experts, or of another linear module
    #: Path of the fused module that another linear module is part of, or the module's own path; None for experts.
    fused: str | None = None

    @property
    def renamings(self) -> Mapping[str, str] | None:
        """Prefixes that the model class replaces in entries of the config, old to new; None if it does not do so."""
        return renamings(self.policy.version, self.probe.shape.architecture)

    def renamed(self, name: str) -> str:
        """Return the name of the engine's module for a name in the checkpoint or its config."""
        for old, new in (self.renamings or {}).items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        return name

    @property
    def shards(self) -> list[str]:
        """Checkpoint paths of the modules that the fused module joins, where the engine asks the config for them."""
        fused = self.fused or ""
        linears = linears_of(self.policy.version, self.probe.shape.architecture) if fused else ()
        found = next((one for one in linears if one.listed and f".{fused}".endswith(f".{one.path}")), None)
        return [fused.removesuffix(found.path) + shard for shard in found.shards] if found else []

    @property
    def is_head(self) -> bool:
        """Whether the module is the output head."""
        return self.prefix.endswith(HEAD)

    @property
    def policy(self) -> EnginePolicy:
        """Policy of the engine's version."""
        return self.probe.policy

    @property
    def platform(self) -> str:
        """Platform of the device."""
        return self.probe.gpu.platform

    def engine_path(self, path: str) -> str:
        """Return a module's path within the engine's class, for the case's architecture."""
        return engine_path(self.probe.shape.architecture, path)


def engine_path(architecture: str, path: str) -> str:
    """Return a module's path within the engine's class, which regular expressions of a config are matched with.

    Mappers of image classes rename modules and plain entries, but no expressions (vLLM 0.26.0 to 0.33.0,
    `CompressedTensorsConfig.apply_vllm_mapper`, `AutoGPTQConfig.apply_vllm_mapper`).
    """
    wrapped, stem = architecture.endswith("ForConditionalGeneration"), "model.language_model."
    return "language_model.model." + path.removeprefix(stem) if wrapped and path.startswith(stem) else path


def moved_experts(question: ConfigQuestion) -> ConfigQuestion:
    """Return the question with the path at which versions before 0.31 keep Gemma-4's experts: `moe.experts` of a layer.

    Versions since 0.28 rename entries of the config that end in `experts`. Source: `gemma4.py`, vLLM 0.26.0 to 0.30.0.
    """
    shape, policy = question.probe.shape, question.policy
    if not shape.architecture.startswith("Gemma4") or question.fused is not None or policy.since("0.31.0"):
        return question
    config = _with_moved_entries(question.config) if policy.since("0.28.0") else question.config
    return replace(question, prefix=_moved(question.prefix), config=config)


def _moved(path: str) -> str:
    return re.sub(r"(?<!\.moe)\.experts$", ".moe.experts", path)


def _with_moved_entries(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_moved(key): _with_moved_entries(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_moved_entries(one) for one in value]
    return _moved(value) if isinstance(value, str) else value


Reader = Callable[[ConfigQuestion], Method]


def refuse(
    text: str, hint: str | None = None, code: str = "G0", *, error: str = "ValueError", kind: str = "CONFIG"
) -> NoReturn:
    """Raise ConfigRefusal for a config at which the engine raises `error`, or which it runs without experts."""
    raise ConfigRefusal(error, kind, text, hint, code)


def check_layer(case: Case) -> None:
    """Check the engine's assertions about a layer before it reads any config; gate G5 checks the division of sizes."""
    if case.shape.activation not in case.policy.activations:
        text = f"{case.policy.name} has no activation {case.shape.activation}"
        refuse(text, f"it has {', '.join(case.policy.activations)}", "P03_ACTIVATION", kind="SHAPE")
    for name in INTEGER_VARIABLES:
        value = case.env(name)
        if value is not None and not is_integer(value):
            refuse(f"{name} is {value!r}, which is not a number", f"set {name}=1 or {name}=0, or unset it")
    dtype = case.env("VLLM_MARLIN_INPUT_DTYPE")
    if dtype not in (None, "int8", "fp8"):
        refuse(f"VLLM_MARLIN_INPUT_DTYPE is {dtype!r}, not int8 or fp8", "unset VLLM_MARLIN_INPUT_DTYPE")
    if not case.gated and case.gpu.platform == "cpu":
        text = f"experts without a gate ({case.shape.activation}) are not supported on CPUs"
        refuse(text, code="P02_NOT_GATED", error="NotImplementedError", kind="SHAPE")


def unquantized(_: object = None) -> Method:
    """Return the method of experts that a rule leaves unquantised."""
    return Method("UnquantizedFusedMoEMethod", "unquantized", "none", "none")


def built_in_kernel(case: Case, method: Method) -> Method:
    """Mark the method as built in if an older version on a CPU runs unquantised experts without an experts class."""
    old = case.gpu.platform == "cpu" and not case.policy.since("0.28.0")
    return replace(method, built_in=("CPU", None)) if old and method.family == "unquantized" else method


def required(config: Config, *names: str) -> Any:
    """Return the value of the first of a key's spellings that the config has; refuse the config if it has none."""
    for name in names:
        if name in config:
            return config[name]
    refuse(f"quantization_config lacks {' / '.join(names)}")


def integer(config: Config, *names: str) -> int:
    """Return the value of a key that has to be an integer; refuse anything else."""
    value = required(config, *names)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(f"quantization_config {names[0]} is {value!r}, not an integer")
    return value


def skipped_by(entries: Iterable[str] | None, prefix: str) -> bool:
    """Tell whether a list of unquantised modules names the experts: an entry matches any part of the path."""
    return any(entry in prefix for entry in entries or ())


def skipped_module(entries: Iterable[str] | None, prefix: str, fused: str | None) -> bool:
    """Tell whether a list of exact module names skips a module; experts are skipped if a name lies in their module.

    Shared experts count as experts, unless they are part of a fused module.
    """
    if "experts" not in prefix or fused not in (None, prefix):
        return any(name in (entries or ()) for name in (prefix, fused or prefix))
    return any("experts" in entry and prefix in entry for entry in entries or ())


def marlin_fails(question: ConfigQuestion, group: int, *, tile_padding: bool = True) -> bool:
    """Tell whether Marlin's shape test fails; the GPTQ and AWQ integrations run it themselves."""
    return next(marlin_shape(question.probe, group, tile_padding=tile_padding), None) is not None


def weight_only_key(bits: int, symmetric: bool, group: int) -> str:
    """Return the key of weight-only integers. Only 4-bit keys tell group 32, only uncommon widths channel scales."""
    asym = "" if symmetric else "Asym"
    if bits == 8:
        return f"kInt8Static{asym}"
    if bits == 4:
        return f"kInt4Static{'32' if group == 32 else ''}{asym}"
    return f"kUint{bits}Static{'Channel' if group == -1 else ''}{asym}"


#: Backends that do not apply the scales per output channel of experts that are quantised while loading.
_NO_CHANNEL_SCALES = ("MARLIN", "CPU", "CPU_W8A8", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")


def check_selected(case: Case, backend: str) -> None:
    """Check the integration's assertions about the selected backend. Raises ConfigRefusal if one of them fails."""
    name, marlin = case.method.name, backend in ("MARLIN", "BATCHED_MARLIN")
    if case.method.marlin_assertion and not marlin:
        what = "act-order" if case.method.act_order else "per-channel scales"
        text = f"{what}: {backend} is selected and a check that only Marlin passes stops the engine"
        hint = "--moe-backend marlin where it is supported"
        raise ConfigRefusal("AssertionError", "BARE_ASSERTION", text, hint)
    if case.method.symmetric_assertion and case.method.raw_zero_points and not marlin:
        text = f"zero points: {backend} is selected and this version stops at them"
        raise ConfigRefusal("AssertionError", "CONFIG", text, "--moe-backend marlin where it is supported")
    if (name == "AutoGPTQMoEMethod" and case.method.checks_input) or (
        name == "CompressedTensorsWNA16MoEMethod" and marlin
    ):
        check_marlin_input(case)
    if name == "Fp8PtpcOnlineMoEMethod" and backend in _NO_CHANNEL_SCALES and case.policy.since("0.33.0"):
        refuse(f"{backend} does not apply one scale per output channel")


def check_marlin_input(case: Case) -> None:
    """Check VLLM_MARLIN_INPUT_DTYPE: fp8 activations work on Ada and consumer Blackwell only."""
    capability = case.gpu.capability
    fits = case.gpu.platform == "cuda" and capability is not None and (capability == (8, 9) or capability[0] == 12)
    if (case.env("VLLM_MARLIN_INPUT_DTYPE") or "").lower() == "fp8" and not fits:
        refuse(
            "VLLM_MARLIN_INPUT_DTYPE=fp8 works on compute capability 8.9 and 12.x only", "unset VLLM_MARLIN_INPUT_DTYPE"
        )
