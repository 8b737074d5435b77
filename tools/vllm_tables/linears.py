"""Which linear modules of vLLM's model classes ask the quantisation config for a method, by building the classes.

Run by `python tools/extract.py linears 0.33.0 --site SITE`. Every class is built on the meta device with a config that
writes down who asks it, once with experts in every layer and once with a first layer that has none. The result is one
version's part of `linears.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from moeq.oracle.versions import release
from vllm_tables import names
from vllm_tables.model_classes import MODELS

#: What gives the first layer no experts; every config takes what it knows.
_DENSE_FIRST: dict[str, Any] = {
    "first_k_dense_replace": 1, "mlp_only_layers": [0], "num_dense_layers": 1, "interleave_moe_layer_step": 2,
}  # fmt: skip


def recorder() -> Any:
    """A quantisation config that quantises nothing, with who asked it in `asked`: prefix and module."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    class Recorder(QuantizationConfig):  # type: ignore[misc]
        """See `recorder`."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: dict[str, Any] = {}
            self.renamed: dict[str, str] | None = None

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.renamed = dict(hf_to_vllm_mapper.orig_to_new_prefix)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            linear = isinstance(layer, LinearBase)
            if linear or isinstance(layer, ParallelLMHead):
                self.asked[prefix] = layer
            return UnquantizedLinearMethod() if linear else None

        def get_name(self) -> Any:
            return "recorder"

        def get_supported_act_dtypes(self) -> list[Any]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

    return Recorder()


def _split_of(layer: Any) -> str:
    """How ranks divide a module; `head` of an output head."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear

    kinds = {"row": RowParallelLinear, "column": ColumnParallelLinear}
    split = next((kind for kind, cls in kinds.items() if isinstance(layer, cls)), "whole")
    return "head" if not isinstance(layer, LinearBase) else "whole" if getattr(layer, "disable_tp", False) else split


def linears_of(model_type: str, architecture: str, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Paths of the modules that ask, below a layer: how ranks divide each, and the modules that it is made of.

    Modules that lie in no layer are left out, but for the output head. `renamed`: starts of names in a checkpoint, with
    what the class puts in their place and tells the config; None where it tells nothing.
    """
    found: dict[str, list[str]] = {}
    for extra in ({}, _DENSE_FIRST):
        config = recorder()
        names.make(model_type, architecture, None if more is None else {**more, **extra}, config)
        for prefix, layer in config.asked.items():
            split = _split_of(layer)
            _, inside, below = prefix.rpartition("layers.")
            path = below.partition(".")[2] if inside else "lm_head" if split == "head" else ""
            above, _, leaf = path.rpartition(".")
            shards = config.packed_modules_mapping.get(leaf, ())
            if path and "visual" not in prefix and "vision" not in prefix:
                found[path] = [split, *(f"{above}.{shard}" for shard in shards)]
    return {"renamed": config.renamed, "modules": dict(sorted(found.items()))}


def extract(site: str) -> dict[str, dict[str, Any]]:
    """Modules that ask, by architecture; reports classes that cannot be built."""
    names.install(site)
    found = {}
    for model_type, (architecture, more) in MODELS.items():
        try:
            found[architecture] = linears_of(model_type, architecture, more)
        except Exception as error:  # noqa: BLE001 - a class that wants what is not here is left out
            why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            print(f"{architecture}: {why}", file=sys.stderr)
    return found


def merged(known: Mapping[str, Any], version: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The data file with a version in it: architecture -> rows of versions and modules."""
    document: dict[str, list[dict[str, Any]]] = {}
    for architecture in sorted({*known, *found}):
        by_version = {one: row for row in known.get(architecture, ()) for one in row["versions"]}
        by_version.pop(version, None)
        if architecture in found:
            by_version[version] = found[architecture]
        rows = document.setdefault(architecture, [])
        for one in sorted(by_version, key=release):
            made = {**by_version[one], "versions": [one]}
            same = next((row for row in rows if {**row, "versions": [one]} == made), None)
            if same is None:
                rows.append(made)
            else:
                same["versions"].append(one)
    return document
