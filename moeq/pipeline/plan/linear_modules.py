"""Gate G14: whether linear modules outside experts are stored as the engine, reading the config, expects them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from moeq.checkpoint.facts import KV_HEADS, Facts
from moeq.checkpoint.families import find_family
from moeq.checkpoint.header import TensorEntry
from moeq.deploy.deployment import Deployment, Gpu
from moeq.model import Checkpoint
from moeq.model.modules import is_quantized_module, part_of, parts_of_module
from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.oracle.engines.vllm.linear_methods import lists_some_shards, method_of_linear
from moeq.oracle.engines.vllm.linears import HEAD, LinearModule, linears_of
from moeq.oracle.engines.vllm.parameters import unfit_part
from moeq.oracle.engines.vllm.policy import EnginePolicy, load_policy
from moeq.oracle.records import Gate, MoeShape, Verdict
from moeq.oracle.versions import choose_engine

#: Engines' model classes with two sets of experts (text and vision) that build a layer and a router for each set and
#: give the routers the config's method (vLLM 0.26.0 to 0.33.0, `ernie45_vl_moe`).
CLASSES_OF_SETS = ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeModel")
_ROUTER_OF_SETS = "text_experts_gate"
#: Gate of shared experts, which Qwen's classes make without the config.
_SHARED_GATE = "mlp.shared_expert_gate"
#: Keys of config.json that give classes the width of shared experts, by the starts of their names: the width itself,
#: and a count of experts as wide as the routed ones (vLLM 0.26.0 to 0.33.0). Other classes are not judged.
_SHARED_WIDTHS = {("Qwen2Moe", "Qwen3Next", "Qwen3_5Moe"): "shared_expert_intermediate_size"}
_SHARED_COUNTS = {
    ("AXK1", "DeepseekV2", "DeepseekV3", "Dots1", "Glm4", "GlmMoeDsa", "KimiK25", "SolarOpen"): "n_shared_experts",
    ("Afmoe", "ExaoneMo"): "num_shared_experts",
    ("AriaText", "Ernie4_5_Moe"): "moe_num_shared_experts",
}
#: Classes whose attention heads are `head_dim` wide where config.json says it, and ones that divide the hidden size by
#: the heads in any case (vLLM 0.26.0 to 0.33.0, by building them). Other classes are not judged.
_HEAD_DIM = (
    *("Afmoe", "AriaText", "Dots1", "Ernie4_5_Moe", "Glm4Moe", "Glm4vMoe", "HYV3", "HunYuanMoEV1", "Llama4"),
    *("MiniMaxM2", "Mixtral", "PhiMoE", "Qwen3Moe", "Qwen3VLMoe", "SolarOpen"),
)
_DIVIDED = ("GraniteMoeFor", "GraniteMoeShared", "Olmoe", "Qwen2Moe")
#: Remedies: what the checkpoint needs.
_LISTED = "the module in the config's list of modules that are not quantised"
_NEWER = "a GPU of compute capability 8.9 or higher"
#: Method and platform of Quark's FP8, which only experts run on older devices (vLLM 0.33.0, `_check_scheme_supported`).
_QUARK_FP8 = ("QuarkW8A8Fp8MoEMethod", "cuda")
_MEANING = "a config that says how the module is stored"

#: Fault of a module, and its remedy.
_Problem = tuple[str, str]

#: Cached faults of each checkpoint by the facts that they depend on: verdicts are asked for many devices.
_FOUND: WeakKeyDictionary[Checkpoint, dict[tuple[object, ...], _Problem | None]] = WeakKeyDictionary()


def linear_gate(checkpoint: Checkpoint, verdict: Verdict, layer: int, shape: MoeShape) -> Gate | None:
    """Return the failed gate if a linear module is stored in another form than the engine creates.

    The first MoE layer's gate judges the linear modules of all layers; other layers get no such gate.
    """
    if layer != checkpoint.info.moe_layers[0] or not verdict.engine.startswith("vllm"):
        return None
    found = linear_problem(checkpoint, verdict.engine, verdict.deployment, shape)
    if found is None:
        return None
    return Gate("G14", "router, attention and other linear modules", False, found[0], "ValueError", "LOADING", found[1])


def linear_problem(checkpoint: Checkpoint, engine: str, where: Deployment, shape: MoeShape) -> _Problem | None:
    """Return what is wrong with a linear module that is no expert, and the remedy; None if vLLM loads all of them.

    A conversion of experts cannot remove this fault. `shape` is that of the first MoE layer.
    """
    if checkpoint.is_packed(checkpoint.info.moe_layers[0]):
        return None
    known = _FOUND.setdefault(checkpoint, {})
    key = (engine, where.quantization, where.gpu.platform, where.gpu.capability, where.tp)
    if key not in known:
        loading = _Loading(checkpoint, load_policy(choose_engine(engine).policy), where, shape)
        known[key] = next(loading.problems(), None)
    return known[key]


def unfit_modules(checkpoint: Checkpoint, engine: str, where: Deployment, shape: MoeShape) -> frozenset[str]:
    """Return the modules outside experts that vLLM cannot load as stored, with all shards of each fused module."""
    loading = _Loading(checkpoint, load_policy(choose_engine(engine).policy), where, shape)
    unfit = ((one, above) for one, above in loading.places() if next(loading.of_linear(one, above), None) is not None)
    return frozenset(above + _in_file(path) for one, above in unfit for path in one.shards)


def _in_file(path: str) -> str:
    """Return the path of a module in the file, where the routers of two sets of experts are one module."""
    return path.replace(_ROUTER_OF_SETS, "gate")


@dataclass(frozen=True)
class _Shard:
    """A module of the checkpoint that one linear module of the class is made of."""

    name: str  #: path of the module
    parts: Sequence[TensorEntry]  #: its tensors
    stored: bool  #: whether it is quantised in the file
    meant: Method | bool | str  #: what the config gives it (see `method_of_linear`)


@dataclass(frozen=True)
class _Loading:
    """An engine that loads the linear modules of a checkpoint."""

    checkpoint: Checkpoint
    policy: EnginePolicy
    deployment: Deployment
    shape: MoeShape

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.checkpoint.checked_config or {}

    @cached_property
    def _linears(self) -> tuple[LinearModule, ...]:
        return linears_of(self.policy.version, self.checkpoint.info.architecture)

    @cached_property
    def _layers(self) -> tuple[str, ...]:
        """Paths of the layers, with a dot at the end."""
        info = self.checkpoint.info
        stack = self.checkpoint.experts(info.moe_layers[0]).layer.stack
        numbers = sorted({*info.moe_layers, *info.dense_layers})
        return tuple(f"{stack}.{number}." if stack else f"{number}." for number in numbers)

    def problems(self) -> Iterator[_Problem]:
        for linear, above in self.places():
            yield from self.of_linear(linear, above)
        for above in self._layers:
            yield from self._of_floats(above)

    def places(self) -> Iterator[tuple[LinearModule, str]]:
        """Yield the linear modules of every layer with the layer's path, then the output head."""
        for above in self._layers:
            yield from ((linear, above) for linear in self._linears if linear.path != HEAD)
        source = self.checkpoint.source
        heads = [name.rpartition(".")[0] for name in source.tensors if f"{HEAD}." in name]
        if heads and not source.config.get("tie_word_embeddings"):
            yield from ((linear, heads[0].removesuffix(HEAD)) for linear in self._linears if linear.path == HEAD)

    def _of_floats(self, above: str) -> Iterator[_Problem]:
        """Yield the fault of a quantised router, or gate of shared experts, that the class makes of floats."""
        info = self.checkpoint.info
        family, architecture = find_family(info.model_type), info.architecture
        known = (
            self._linears or names_of_class(self.policy.version, architecture) or architecture.startswith("DeepseekV4")
        )
        judged = {_in_file(path) for one in self._linears for path in one.shards}
        for path in (family.router, _SHARED_GATE) if family is not None and known else ():
            parts = parts_of_module(self.checkpoint.source.tensors, above + path)
            if path not in judged and is_quantized_module(parts):
                leaf = parts[0].name.rpartition(".")[2]
                text = f"{above}{path} is quantised ({leaf}), and the engine creates it as float numbers"
                yield text, "a checkpoint in which it is not quantised"

    def of_linear(self, linear: LinearModule, above: str) -> Iterator[_Problem]:
        """Yield what is wrong with one linear module of the class."""
        shards = list(self._shards(linear, above))
        for shard in shards:
            yield from _load_faults(self.policy.version, shard, self.deployment.gpu)
        names = ", ".join(path.rpartition(".")[2] for path in linear.shards)
        if len({shard.stored for shard in shards}) > 1:
            text = f"{above}: of {names} some are quantised, and the engine makes one module of them"
            yield text, "one encoding for all of them"
        elif shards and lists_some_shards(self.policy, self.config, self.shape.architecture, linear, above):
            yield f"{above}: the config lists some of {names}, and the engine makes one module of them", "all of them"
        yield from self._resized(linear, shards)
        if not self.policy.since("0.30.0"):
            yield from _no_kernel(self.deployment, linear, above, shards)
        methods = [shard.meant for shard in shards if shard.stored and isinstance(shard.meant, Method)]
        blocks = next((self.config.get("weight_block_size", one.block) for one in methods if one.block), None)
        if blocks:
            yield from self._cut_blocks(linear, above, blocks)
        elif linear.split == "row":
            yield from self._cut_groups(linear, above, grouped=any((one.group_size or 0) > 0 for one in methods))

    def _shards(self, linear: LinearModule, above: str) -> Iterator[_Shard]:
        """Yield the parts of a linear module that are in the file."""
        for path in linear.shards:
            name = above + _in_file(path)
            parts = parts_of_module(self.checkpoint.source.tensors, name)
            if not parts:
                continue
            stored = is_quantized_module(parts)
            named = stored and _in_file(path) == path  # the engine looks in the file for its own name
            meant = bool(self.config) and method_of_linear(
                self.policy, self.config, self.shape, self.deployment, linear, path, above, stored=named
            )
            yield _Shard(name, parts, stored, meant)

    @cached_property
    def _shared_width(self) -> int:
        """Width of the shared experts by config.json; 0 where the class or its key is not known."""
        name, facts = self.checkpoint.info.architecture, Facts(self.checkpoint.source.config)
        for table, each in ((_SHARED_WIDTHS, 1), (_SHARED_COUNTS, self.checkpoint.info.intermediate_size)):
            for starts, key in table.items():
                if name.startswith(starts):
                    return (facts.count((key,)) or 0) * each
        return 0

    @cached_property
    def _head_widths(self) -> Mapping[str, int]:
        """Features of the attention's projections by config.json; empty where the class or its keys are not known."""
        name, facts = self.checkpoint.info.architecture, Facts(self.checkpoint.source.config)
        heads, shared = facts.count(("num_attention_heads",)), facts.count(KV_HEADS)
        width = facts.count(("head_dim",)) if name.startswith(_HEAD_DIM) else None
        if name.startswith(_DIVIDED) and heads:
            width = (facts.count(("hidden_size",)) or 0) // heads
        counts = {"q_proj": heads, "k_proj": shared, "v_proj": shared}
        return {leaf: count * width for leaf, count in counts.items() if count and width}

    def _resized(self, linear: LinearModule, shards: Sequence[_Shard]) -> Iterator[_Problem]:
        """Yield the faults of shared experts and heads whose width is not that of config.json.

        The engine would load a part of a wider module without a word.
        """
        shared = "shared_expert" in linear.path and len(linear.shards) > 1
        attention = linear.path == "self_attn.qkv_proj"
        for shard in shards if shared or attention else ():
            leaf = shard.name.rpartition(".")[2]
            found, declared = _features(shard), self._head_widths.get(leaf) if attention else self._shared_width
            if declared and found is not None and found != declared:
                text = f"{shard.name} has {found} features, and the engine creates {declared} by the config"
                yield text, "the right size in config.json"

    def _cut_groups(self, linear: LinearModule, above: str, *, grouped: bool) -> Iterator[_Problem]:
        """Yield the fault of groups of input features that ranks would cut: each loads whole groups (see `parameters`).

        A single group counts only where the config's method has groups: one scale per channel serves every rank.
        """
        tp = self.deployment.tp
        for part, axis in (("scales", 0), ("weight_scale", 1)):
            entry = self.checkpoint.source.tensors.get(f"{above}{linear.shards[0]}.{part}")
            groups = entry.shape[axis] if entry is not None and len(entry.shape) == 2 else 1
            if entry is not None and (groups > 1 or grouped) and groups % tp:
                text = f"{above}{linear.path} has {groups} groups of input features, which tp {tp} would cut"
                yield text, "a tp that divides the groups"

    def _cut_blocks(self, linear: LinearModule, above: str, blocks: Sequence[int]) -> Iterator[_Problem]:
        """Yield faults of ranks' sizes that cut FP8 blocks (vLLM 0.26.0 to 0.33.0, `validate_fp8_block_shape`)."""
        tp = self.deployment.tp
        for place, shard in enumerate(linear.shards, 1):
            weight = self.checkpoint.source.tensors.get(f"{above}{shard}.weight")
            if weight is None or len(weight.shape) != 2:
                continue
            by_head = shard.endswith((".k_proj", ".v_proj"))
            shared = Facts(self.checkpoint.source.config).count(KV_HEADS) if by_head else None
            ranks = {"row": tp, "column": min(tp, shared or tp)}.get(linear.split, 1)
            size, block = (weight.shape[1], blocks[1]) if linear.split == "row" else (weight.shape[0], blocks[0])
            merged = linear.split != "row" and place < len(linear.shards)
            if (ranks > 1 or merged) and (size // ranks) % block:
                text = f"{above}{shard} has {size // ranks} features on a rank of tp {tp}, and FP8 blocks have {block}"
                yield text, "a tp that gives every rank whole blocks"


def _load_faults(version: str, shard: _Shard, gpu: Gpu) -> Iterator[_Problem]:
    """Yield why the engine cannot load a module as it is stored."""
    parts = {part.name.rpartition(".")[2]: (part.dtype, part.shape) for part in shard.parts}
    if isinstance(shard.meant, str):
        yield f"{shard.name}: {shard.meant}", _MEANING
    elif shard.meant and not shard.stored:
        held = shard.parts[0].dtype
        yield f"the config quantises {shard.name} ({part_of(shard.name)}), and the file holds {held}", _LISTED
    elif shard.stored and not shard.meant:
        yield f"{shard.name} is quantised ({', '.join(parts)}), and the engine creates it as float numbers", _MEANING
    elif isinstance(shard.meant, Method):
        if (shard.meant.name, gpu.platform) == _QUARK_FP8 and (gpu.capability or (0, 0)) < (8, 9):
            text = f"{shard.name}: Quark's FP8 outside experts needs compute capability 8.9, which {gpu.name} lacks"
            yield text, _NEWER
        unfit = unfit_part(version, shard.meant, parts)
        if unfit is not None:
            yield f"{shard.meant.name} of {shard.name} cannot be loaded: the file has {unfit}", _MEANING


def _features(shard: _Shard) -> int | None:
    """Return the count of a module's output features; None where its tensors do not show it."""
    parts = {part.name.rpartition(".")[2]: part for part in shard.parts}
    if "scales" in parts:
        return int((1, *parts["scales"].shape)[-1])
    by_row = parts.get("weight_packed") or parts.get("weight")
    transposed = by_row is not None and by_row.dtype == "I32" and "weight" in parts  # Quark's int4
    return None if by_row is None or transposed else int((*by_row.shape, 1)[0])


def _no_kernel(
    deployment: Deployment, linear: LinearModule, above: str, shards: Sequence[_Shard]
) -> Iterator[_Problem]:
    """Yield the fault of act-order with sizes that no kernel takes: Marlin never pads, Machete has larger tiles.

    Source: vLLM 0.26.0 to 0.29.0, `choose_mp_linear_kernel`.
    """
    methods = [shard.meant for shard in shards if shard.stored and isinstance(shard.meant, Method)]
    if deployment.gpu.platform != "cuda" or not methods or not all(one.act_order and one.bits for one in methods):
        return
    cut, tp = linear.split == "row" and deployment.tp > 1, deployment.tp
    n = sum(_features(shard) or 0 for shard in shards) // (tp if linear.split == "column" else 1)
    leaf = next(part for part in shards[0].parts if part.name.endswith(("qweight", "weight_packed")))
    words = leaf.shape[0] if leaf.name.endswith("qweight") else leaf.shape[1]
    k = words * 32 // (methods[0].bits or 4) // (tp if cut else 1)
    machete = deployment.gpu.capability == (9, 0) and not cut and methods[0].group_size in (-1, 64, 128)
    if (n % 64 or k % 128) and not (machete and n % 128 == 0 and k % 64 == 0):
        yield (
            f"act-order: no kernel takes {above}{linear.path} with [{n}, {k}] on a rank of tp {tp}",
            "vLLM 0.30 and newer",
        )
