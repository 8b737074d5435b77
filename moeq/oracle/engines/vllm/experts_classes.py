"""What an engine's experts classes accept: the extracted table of each class as a record that rules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """What a class accepts for some pairs of keys on some devices: one row of the extracted table.

    Attributes:
        pairs: `(weight key, activation key)`; activation `*` is any.
        activations: activation functions.
        routing: routing methods, None for all.
        fp32_logits: routing methods that take fp32 router logits, None for all of `routing`.
        parallel: parallel forms, as `Case.parallel_form` names them.
        dtypes: dtypes of activations.
        lora: adapters on experts.
        bias: expert biases.
        limit: activation functions that may have a clamp, None for all.
        hidden: the hidden size is a multiple of it.
        intermediate: the intermediate size per rank is a multiple of it.
        intermediate_by: the same for activations where it is another.
        max_experts: most experts, None without a limit.
        min_top_k: fewest experts per token.
        hash_routing: experts may be chosen by token id.
        decomposed: the router may stay outside.
        batch_invariant: results do not depend on the batch.
        packages: optional packages it needs.
        env: variables it depends on, each with the values that it stands with (None: unset).
    """

    pairs: frozenset[tuple[str, str]]
    activations: tuple[str, ...]
    parallel: frozenset[str]
    routing: tuple[str, ...] | None = None
    fp32_logits: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ()
    lora: bool = False
    bias: bool = True
    limit: tuple[str, ...] | None = None
    hidden: int | None = 1
    intermediate: int | None = 1
    intermediate_by: tuple[tuple[str, int], ...] = ()
    max_experts: int | None = None
    min_top_k: int | None = 1
    hash_routing: bool = True
    decomposed: bool = True
    batch_invariant: bool = False
    packages: tuple[str, ...] = ()
    env: tuple[tuple[str, tuple[str | None, ...]], ...] = ()

    def admits(self, weight: str, activation: str) -> bool:
        """Whether a pair of keys is among its own."""
        return (weight, activation) in self.pairs or (weight, "*") in self.pairs


def _variant(row: Mapping[str, Any], forms: tuple[str, ...]) -> Variant:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    values["pairs"] = frozenset(_pair(text) for text in row["pairs"])
    refused = frozenset(row["parallel"].get("not", ()))
    values["parallel"] = frozenset(row["parallel"].get("only", ())) or frozenset(forms) - refused
    values["intermediate_by"] = tuple(row.get("intermediate_by", {}).items())
    values["env"] = tuple((name, tuple(allowed)) for name, allowed in row.get("env", {}).items())
    return Variant(**values)


def _pair(text: str) -> tuple[str, str]:
    weight, _, activation = text.partition("|")
    return weight, activation


@dataclass(frozen=True)
class ExpertsClass:
    """One experts class: its variants by device, and what it leaves out although it says yes.

    Attributes:
        name: class name (`W4A8:` before one that is there twice).
        format: activation format, `standard` or `batched`.
        monolithic: it does its own routing.
        gemm_type: Humming's GEMM type, None for others.
        variants: device -> variants.
        ignores_lora: adapters are not applied.
        drops_bias: biases are not added.
        drops_zero_points: stored zero points are not read.
        drops_scaling: the routed scaling factor and the clamp are not applied.
        asserted_dtypes: dtypes asserted when the kernel is made.
    """

    name: str
    format: str
    monolithic: bool
    gemm_type: str | None
    variants: Mapping[str, tuple[Variant, ...]]
    ignores_lora: bool = False
    drops_bias: bool = False
    drops_zero_points: bool = False
    drops_scaling: bool = False
    asserted_dtypes: tuple[str, ...] | None = None

    @property
    def short(self) -> str:
        """The engine's own name of the class."""
        return self.name.rpartition(":")[2]


def experts_class(name: str, row: Mapping[str, Any], forms: tuple[str, ...], flags: Mapping[str, Any]) -> ExpertsClass:
    """From a row of the extracted tables, and what moeq knows of the class beside it."""
    variants: dict[str, tuple[Variant, ...]] = {}
    for block in row["blocks"]:
        made = tuple(_variant(item, forms) for item in block["variants"])
        variants.update({device: made for device in block["devices"]})
    asserted = {"asserted_dtypes": tuple(flags["asserted_dtypes"])} if "asserted_dtypes" in flags else {}
    return ExpertsClass(name, row["format"], row["monolithic"], row["gemm_type"], variants, **{**flags, **asserted})
