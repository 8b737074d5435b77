"""Pages about formats and layouts, and README's summary of both, from the registries."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable

from moeq.layouts.registry import LAYOUTS, NOT_OFFLINE, layout_class
from moeq.oracle.loaders import SGLANG_MODELS, version_ranges
from moeq.schemes.registry import FORMATS, get_format
from moeq_kernels.capabilities import CAPABILITIES
from pages.tables import NOTE, cell, table

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
