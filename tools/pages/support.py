"""Pages about formats and layouts, and README's summary of both, from the registries."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable

from moeq.layouts.registry import LAYOUTS, layout_class
from moeq.oracle.loaders import SGLANG_MODELS, version_ranges
from moeq.schemes.registry import FORMATS, get_format
from moeq_kernels.capabilities import CAPABILITIES
from pages.tables import NOTE, cell, table

#: What cannot be packed offline, and why.
NOT_OFFLINE: dict[str, str] = {
    "Humming, other modes": "native-dequant, packed-K and W4A8 modes depend on the GPU's SM version, the compiler, "
    "tuned configurations and extremes of the local shard",
    "Zen CPU": "the bytes come from an opaque operator of zentorch",
    "CUTLASS W4A8": "its group scales are rounded to E4M3 by an operator of the GPU, which was not tried; the order of "
    "its weights is `n o2 r8, k h2 q4 i4 -> k n r q h o i`, as CUTLASS's own templates say when compiled for a CPU",
    "FP8 x FP8 on a CPU": "only CPUs with AMX-FP8 run it, and on others the engine's operator arranges w13 otherwise",
    "int4 on an Arm CPU": "the bytes come from an operator of PyTorch, which differ with the CPU it was built for",
    "FlashInfer megakernels (MoE-EP)": "they arrange the checkpoint's tensors in code for their GPU",
    "FP8 with a scale each for gate and up, in AITER's and Intel's kernels": "the engine requantises both to the "
    "larger with an operator of the GPU, which was not read",
    "WNA16 emulation": "experts are dequantised to bf16 at load: nothing is packed",
    "Machete": "dense layers only; no MoE kernel reads it",
}

#: Formats that are recognised and hold nothing that could be converted.
_NO_FORMATS = ("unquantized", "foreign")


def formats_page() -> str:
    """Return docs/reference/formats.md: every checkpoint format."""
    rows = [
        (f"`{found.id}`", cell(found.title), "yes" if found.refusal is None else f"no: {found.refusal}")
        for found in map(get_format, FORMATS)
    ]
    return f"# Checkpoint formats\n\n{NOTE}\n\n{table(('format', 'how it stores weights', 'converted'), rows)}\n"


def layouts_page() -> str:
    """Return docs/reference/layouts.md: every kernel layout, what loads it, and what cannot be packed offline."""
    own = {capability.layout for capability in CAPABILITIES}
    rows = [
        (
            f"`{facts.id}`",
            facts.title,
            facts.schemes,
            facts.arch,
            _engine(facts.id),
            "yes" if facts.id in own else "",
            facts.source,
        )
        for facts in LAYOUTS.values()
    ]
    head = ("layout", "read by", "holds", "devices", "vLLM's kernels through the plug-in", "moeq's kernels", "bytes of")
    intro = (
        "`moeq convert` writes a layout; its number changes whenever its bytes change. *vLLM's kernels*: the name for\n"
        "`--moe-backend` and the versions that read it. *moeq's kernels* run in vLLM, SGLang, transformers and\n"
        "`run-check`. `moeq explain LAYOUT` adds padding and legal slices."
    )
    reasons = "\n".join(f"* {name}: {reason}." for name, reason in NOT_OFFLINE.items())
    parts = ["# Kernel layouts", NOTE, intro, table(head, rows), "## What cannot be packed offline", reasons]
    return "\n\n".join(parts) + "\n"


def _engine(layout: str) -> str:
    """Name the backends of vLLM that read a layout, their values of `--moe-backend`, and the versions."""
    readers = layout_class(layout).vllm_readers()
    return "; ".join(f"{reader.backend} (`{reader.option}`), {version_ranges(reader.versions)}" for reader in readers)


def sglang_models() -> str:
    """Return the list of model classes that SGLang's plug-in was tried with."""
    named = ", ".join(f"`{name.removesuffix('ForCausalLM')}`" for name in sorted(SGLANG_MODELS)) + "."
    return "\n".join(textwrap.wrap(named, 120))


def summary() -> str:
    """Return README's table: formats by what they hold, and layouts by the library that reads them."""
    formats = [get_format(name) for name in FORMATS if name not in _NO_FORMATS]
    families: dict[str, list[str]] = defaultdict(list)
    for layout in LAYOUTS:
        family, _, rest = layout.partition("/")[0].partition("-")
        families[family].append(rest)
    several = {family: names for family, names in families.items() if len(names) > 2}
    few = [f"{family}-{name}" for family, names in families.items() if len(names) <= 2 for name in names]
    rows = [
        ("formats, converted", _names(found.id for found in formats if found.refusal is None)),
        ("formats, read only", _names(found.id for found in formats if found.refusal is not None)),
        ("layouts", "; ".join(f"{family}-: {_names(names)}" for family, names in several.items())),
        ("other layouts", _names(few)),
    ]
    return table(("what", "which"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
