"""Count the quantised modules of each part of a model, by headers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeq.checkpoint.header import TensorEntry
from moeq.model.info import ModuleUse

#: Names of parts that only quantised modules have.
_QUANT_LEAVES = frozenset(
    {
        "qweight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "scales",
        "SCB",
        "W_q",
        "absmax",
    }
)

#: Dtypes of `weight` that only quantised modules have.
_QUANT_DTYPES = frozenset({"I8", "U8", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"})

#: Dtypes of a router's tensors that mean quantisation.
_PACKED = frozenset({"I32", "I8", "U8"})

#: Component of a module name, and the part of the model that it means. The first matching rule takes precedence.
_RULES: tuple[tuple[str, str], ...] = (
    ("mtp", "mtp"),
    ("shared_expert_gate", "router"),
    ("shared_expert", "shared experts"),
    ("shared_experts", "shared experts"),
    ("share_expert", "shared experts"),
    ("shared_mlp", "shared experts"),
    ("gate", "router"),
    ("router", "router"),
    ("self_attn", "attention"),
    ("attention", "attention"),
    ("attn", "attention"),
    ("linear_attn", "attention"),
    ("norm_attn_norm", "attention"),
    ("vision_tower", "vision"),
    ("visual", "vision"),
    ("vision_model", "vision"),
    ("mlp", "dense mlp"),
    ("feed_forward", "dense mlp"),
    ("ffn", "dense mlp"),
    ("lm_head", "lm_head"),
    ("output", "lm_head"),
    ("head", "lm_head"),
    ("embed_tokens", "embeddings"),
    ("tok_embeddings", "embeddings"),
    ("wte", "embeddings"),
    ("embed", "embeddings"),
)


@dataclass
class _Module:
    quantized: bool = False  #: whether a tensor of the module is quantised
    matrix: bool = False  #: whether a tensor of the module has two axes or more


def _is_quantised_leaf(leaf: str) -> bool:
    """Return whether only quantised modules have a tensor of that name."""
    return leaf in _QUANT_LEAVES or leaf.startswith("gguf_")


def part_of(module: str) -> str:
    """Return the part of the model that a module belongs to."""
    components = set(module.split("."))
    return next((part for name, part in _RULES if name in components), "other")


def module_uses(tensors: Iterable[TensorEntry], experts: ModuleUse) -> list[ModuleUse]:
    """Count modules for each part of the model: the routed experts first, then the other parts by size.

    Args:
        tensors: every tensor that is not a routed expert's.
        experts: the count of the routed experts.
    """
    modules: dict[str, _Module] = {}
    sizes: dict[str, int] = {}
    for entry in tensors:
        name = entry.name.rpartition(".")[0]
        module = modules.setdefault(name, _Module())
        module.matrix |= len(entry.shape) >= 2
        module.quantized |= is_quantized_module([entry])
        part = part_of(name)
        sizes[part] = sizes.get(part, 0) + entry.nbytes
    counts: dict[str, list[int]] = {}
    for name, module in modules.items():
        if module.matrix or module.quantized:
            counts.setdefault(part_of(name), [0, 0])[0 if module.quantized else 1] += 1
    rest = [ModuleUse(part, numbers[0], numbers[1], sizes[part]) for part, numbers in counts.items()]
    return [experts, *sorted(rest, key=lambda use: -use.bytes)]


def parts_of_module(tensors: Mapping[str, TensorEntry], module: str) -> list[TensorEntry]:
    """List the tensors of a module that hold its weights or their scales."""
    names = (f"{module}.{leaf}" for leaf in ("weight", *sorted(_QUANT_LEAVES)))
    return [tensors[name] for name in names if name in tensors]


def is_quantized_module(parts: Iterable[TensorEntry]) -> bool:
    """Return whether the parts of a module hold quantised weights."""
    leaves = ((part.name.rpartition(".")[2], part.dtype) for part in parts)
    return any(_is_quantised_leaf(leaf) or (leaf == "weight" and dtype in _QUANT_DTYPES) for leaf, dtype in leaves)


def quantized_routers(tensors: Iterable[TensorEntry]) -> list[str]:
    """List router modules that are quantised, which engines do not expect."""
    found: dict[str, None] = {}
    for entry in tensors:
        name, _, leaf = entry.name.rpartition(".")
        # DeepSeek-V4's hash-routed layers keep an integer table that is not a weight.
        if leaf != "tid2eid" and part_of(name) == "router" and (_is_quantised_leaf(leaf) or entry.dtype in _PACKED):
            found[name] = None
    return list(found)
