"""Gate G14: linear modules that are no experts, as the file holds them and as the engine's config means them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from moeq.checkpoint.facts import KV_HEADS, Facts
from moeq.checkpoint.families import find_family
from moeq.model import Checkpoint
from moeq.model.modules import is_quantized_module, part_of, parts_of_module
from moeq.oracle.engines.vllm.expert_names import names_of_class
from moeq.oracle.engines.vllm.linear_methods import lists_some_shards, method_of_linear
from moeq.oracle.engines.vllm.linears import HEAD, LinearModule, linears_of
from moeq.oracle.engines.vllm.parameters import unfit_part
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.quantization_config import checked
from moeq.oracle.records import Gate, MoeShape, Verdict
from moeq.oracle.versions import choose_engine

#: Classes of engines that build one layer and one router for each set of experts, and give the routers the config's
#: method (vLLM 0.26.0 to 0.33.0, `ernie45_vl_moe`).
CLASSES_OF_SETS = ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeModel")
_ROUTER_OF_SETS = "text_experts_gate"
_LISTED = "the module in the config's list of modules that are not quantised"
_NEWER = "a GPU of compute capability 8.9 or higher"
#: Method and platform of Quark's FP8, which only experts run on older devices (vLLM 0.33.0, `_check_scheme_supported`).
_QUARK_FP8 = ("QuarkW8A8Fp8MoEMethod", "cuda")
_MEANING = "a config that says how the module is stored"

#: What was found of a checkpoint, by all that it depends on: a verdict is asked for many devices.
_FOUND: WeakKeyDictionary[Checkpoint, dict[tuple[object, ...], tuple[str, str] | None]] = WeakKeyDictionary()


def linear_gate(checkpoint: Checkpoint, verdict: Verdict, layer: int, shape: MoeShape) -> Gate | None:
    """Return the failed gate if a linear module is stored otherwise than the engine creates it.

    All layers of the model are looked at with its first MoE layer, and with others none.
    """
    if layer != checkpoint.info.moe_layers[0] or checkpoint.is_packed(layer) or not verdict.engine.startswith("vllm"):
        return None
    where, known = verdict.deployment, _FOUND.setdefault(checkpoint, {})
    key = (verdict.engine, where.quantization, where.gpu.platform, where.gpu.capability, where.tp)
    if key not in known:
        known[key] = next(_problems(checkpoint, verdict, layer, shape), None)
    found = known[key]
    if found is None:
        return None
    return Gate("G14", "router, attention and other linear modules", False, found[0], "ValueError", "LOADING", found[1])


def _problems(checkpoint: Checkpoint, verdict: Verdict, layer: int, shape: MoeShape) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the linear modules, and the remedy."""
    info, version = checkpoint.info, load_policy(choose_engine(verdict.engine).policy).version
    linears = linears_of(version, info.architecture)
    stack = checkpoint.experts(layer).layer.stack
    heads = [name.rpartition(".")[0] for name in checkpoint.source.tensors if f"{HEAD}." in name]
    for number in sorted({*info.moe_layers, *info.dense_layers}):
        above = f"{stack}.{number}." if stack else f"{number}."
        for linear in linears:
            if linear.path != HEAD:
                yield from _of_linear(checkpoint, verdict, shape, linear, above)
        yield from _of_router(checkpoint, version, above, linears)
    for linear in linears:
        if linear.path == HEAD and heads and not checkpoint.source.config.get("tie_word_embeddings"):
            yield from _of_linear(checkpoint, verdict, shape, linear, heads[0].removesuffix(HEAD))


def _of_router(
    checkpoint: Checkpoint, version: str, above: str, linears: tuple[LinearModule, ...]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield a quantised router of a class whose routers are float numbers whatever the config says."""
    family = find_family(checkpoint.info.model_type)
    architecture = checkpoint.info.architecture
    known = linears or names_of_class(version, architecture) or architecture.startswith("DeepseekV4")
    if family is None or not known or any(_in_file(path) == family.router for one in linears for path in one.shards):
        return
    parts = parts_of_module(checkpoint.source.tensors, above + family.router)
    if is_quantized_module(parts):
        leaf = parts[0].name.rpartition(".")[2]
        text = f"{above}{family.router} is quantised ({leaf}), and the engine creates it as float numbers"
        yield text, "a checkpoint whose router is not quantised"


def _in_file(path: str) -> str:
    """Return the path of a module in the file: the routers of two sets are one module there."""
    return path.replace(_ROUTER_OF_SETS, "gate")


def _of_linear(
    checkpoint: Checkpoint, verdict: Verdict, shape: MoeShape, linear: LinearModule, above: str
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield what is wrong with one linear module of the class."""
    tensors, policy = checkpoint.source.tensors, load_policy(choose_engine(verdict.engine).policy)
    config = checkpoint.quantization_config and checked(checkpoint.quantization_config)
    states, blocks, gpu = set(), None, verdict.deployment.gpu
    for shard in linear.shards:
        module = above + _in_file(shard)
        parts = parts_of_module(tensors, module)
        if not parts:
            continue
        stored = is_quantized_module(parts)
        states.add(stored)
        named = stored and _in_file(shard) == shard  # the engine looks in the file for its own name
        meant = config is not None and method_of_linear(
            policy, config, shape, verdict.deployment, linear, shard, above, stored=named
        )
        if meant and not stored:
            yield f"the config quantises {module} ({part_of(module)}), and the file holds {parts[0].dtype}", _LISTED
        elif stored and not meant:
            held = ", ".join(part.name.rpartition(".")[2] for part in parts)
            yield f"{module} is quantised ({held}), and the engine creates it as float numbers", _MEANING
        elif stored and not isinstance(meant, bool):
            dtypes = {part.name.rpartition(".")[2]: part.dtype for part in parts}
            unfit = unfit_part(policy.version, meant, dtypes)
            if (meant.name, gpu.platform) == _QUARK_FP8 and (gpu.capability or (0, 0)) < (8, 9):
                yield f"{module}: Quark's FP8 outside experts needs compute capability 8.9, this is {gpu.name}", _NEWER
            blocks = blocks or (meant.block and (config or {}).get("weight_block_size", meant.block))
            if unfit is not None:
                yield f"{meant.name} of {module} cannot be loaded: the file has {unfit}", _MEANING
    if len(states) > 1:
        names = ", ".join(shard.rpartition(".")[2] for shard in linear.shards)
        yield f"{above}: of {names} some are quantised, and the engine makes one module of them", "one encoding of all"
    elif len(states) and lists_some_shards(policy, config or {}, shape.architecture, linear, above):
        names = ", ".join(shard.rpartition(".")[2] for shard in linear.shards)
        yield f"{above}: the config lists some of {names}, and the engine makes one module of them", "all of them"
    if blocks:
        yield from _cut_blocks(checkpoint, verdict.deployment.tp, linear, above, blocks)
    elif linear.split == "row":
        yield from _cut_groups(checkpoint, verdict.deployment.tp, linear, above)


def _cut_groups(checkpoint: Checkpoint, tp: int, linear: LinearModule, above: str) -> Iterator[tuple[str, str]]:
    """Yield groups of input features that ranks cannot share out: each would load whole ones (see `parameters`)."""
    for part, axis in (("scales", 0), ("weight_scale", 1)):
        entry = checkpoint.source.tensors.get(f"{above}{linear.shards[0]}.{part}")
        if entry is not None and len(entry.shape) == 2 and entry.shape[axis] > 1 and entry.shape[axis] % tp:
            text = f"{above}{linear.path} has {entry.shape[axis]} groups of input features, which tp {tp} would cut"
            yield text, "a tp that divides the groups"


def _cut_blocks(
    checkpoint: Checkpoint, tp: int, linear: LinearModule, above: str, blocks: Sequence[int]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield sizes of a rank that blocks of FP8 do not divide (vLLM 0.26.0 to 0.33.0, `validate_fp8_block_shape`)."""
    for place, shard in enumerate(linear.shards, 1):
        weight = checkpoint.source.tensors.get(f"{above}{shard}.weight")
        if weight is None or len(weight.shape) != 2:
            continue
        shared = Facts(checkpoint.source.config).count(KV_HEADS) if shard.endswith((".k_proj", ".v_proj")) else None
        ranks = {"row": tp, "column": min(tp, shared or tp)}.get(linear.split, 1)
        size, block = (weight.shape[1], blocks[1]) if linear.split == "row" else (weight.shape[0], blocks[0])
        merged = linear.split != "row" and place < len(linear.shards)
        if (ranks > 1 or merged) and (size // ranks) % block:
            text = f"{above}{shard} has {size // ranks} features on a rank of tp {tp}, and FP8 blocks have {block}"
            yield text, "a tp that gives every rank whole blocks"
