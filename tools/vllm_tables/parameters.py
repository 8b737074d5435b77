"""Extract the parameters that each quantisation method of vLLM creates for experts, and the tensors that they load.

Run by `python tools/extract.py parameters 0.33.0 --site SITE`. Every sample config goes through vLLM's own config class
and method; `create_weights` allocates small real tensors, and the layer's own `weight_loader` gets tensors of every
shape that a checkpoint could store. A shape counts as loaded if all of its numbers arrive in the parameter.

The result is one version's part of `parameters.json`: per method and kind of weights, parameter name -> dtype and
shape of one expert's stored tensor, for gate or up (`w1`) and for down (`w2`). Shapes are written with `N` (output
features), `K` (input features) and `G` (weights per scale, or `GN x G` blocks): `["N", "K/8"]`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.parameters import key_of
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape
from moeq.oracle.versions import release
from vllm_tables import inside, sandbox
from vllm_tables.questions import BASE, RICH

#: Sizes of the probed layers: all different, so that a dimension says what it depends on.
_SIZES = ((768, 256), (1280, 384))
_EXPERTS = 2
#: Devices to ask, until one of them accepts a sample.
_WORLDS: dict[str, dict[str, Any]] = {
    "sm90": {"kind": "cuda", "cap": [9, 0]},
    "gfx950": {"kind": "rocm", "gcn": "gfx950"},
    "x86-amx": {"kind": "cpu", "arch": "x86", "amx": True},
}


def _ct(format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format_, "ignore": [], "config_groups": {"group_0": group}}


def _args(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    found = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {**found, "group_size": group} if group else found


def _quark(weight: Any, inputs: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"}, "exclude": [],
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
    }  # fmt: skip


Sample = tuple[dict[str, Any] | None, dict[str, Any]]


def samples() -> Iterator[Sample]:
    """Yield (config, changes of the question) for every kind of weights that a method of vLLM reads."""
    yield None, {}
    yield from _integers()
    yield from _compressed_tensors()
    yield from _floats()
    yield from _auto_round()
    yield from _quarks()


def _integers() -> Iterator[Sample]:
    wna16 = {"entry": "moe_wna16", "user_quant": "moe_wna16"}
    for bits, group in itertools.product((4, 8), (128, 32, -1)):
        gptq = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True}
        yield gptq, {"entry": "gptq"}
        yield gptq, wna16
        yield {**gptq, "sym": False}, wna16
    for group, zero in itertools.product((128, 32), (True, False)):
        awq = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero}
        yield awq, {"entry": "awq"}
        yield awq, wna16


def _compressed_tensors() -> Iterator[Sample]:
    for bits, group, sym in itertools.product((2, 3, 4, 5, 6, 7, 8), (128, 32, None), (True, False)):
        weights = _args(bits, "int", "group" if group else "channel", group, symmetric=sym)
        yield _ct("pack-quantized", weights), {}
    token = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    yield _ct("int-quantized", _args(8, "int", "channel"), {**token, "type": "int"}), {}
    yield _ct("float-quantized", _args(8, "float", "channel"), {**token, "type": "float"}), {}
    for dynamic in (True, False):
        inputs = _args(8, "float", "tensor", dynamic=dynamic)
        yield _ct("float-quantized", _args(8, "float", "tensor"), inputs), {}
    block = _args(8, "float", "block", block_structure=[128, 128])
    yield _ct("float-quantized", block, _args(8, "float", "group", 128, dynamic=True)), {}
    nvfp4 = _args(4, "float", "tensor_group", 16)
    yield _ct("nvfp4-pack-quantized", nvfp4, {**nvfp4, "dynamic": "local"}), {}
    yield _ct("nvfp4-pack-quantized", nvfp4), {}
    mxfp4 = {**_args(4, "float", "group", 32), "scale_dtype": "torch.uint8"}
    yield _ct("mxfp4-pack-quantized", mxfp4), {}
    yield _ct("mxfp4-pack-quantized", mxfp4, {**token, "type": "float"}), {}
    mxfp8 = {**_args(8, "float", "group", 32), "scale_dtype": "torch.uint8"}
    yield _ct("mxfp8-quantized", mxfp8, {**mxfp8, "dynamic": True}), {}
    for kind in ("float", "int"):
        yield _ct("pack-quantized", _args(4, "int", "group", 128), {**token, "type": kind}), {}
    yield _ct("pack-quantized", _args(4, "int", "channel"), {**token, "type": "int"}), {}


def _floats() -> Iterator[Sample]:
    gpt_oss = {"model_type": "gpt_oss", "act": "swigluoai", "bias": True}
    yield {"quant_method": "mxfp4"}, {"entry": "gpt_oss_mxfp4", **gpt_oss}
    yield {"quant_method": "mxfp4"}, {"entry": "mxfp4"}
    for scheme in ("dynamic", "static"):
        yield {"quant_method": "fp8", "activation_scheme": scheme}, {"entry": "fp8"}
    yield {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {"entry": "fp8"}
    for algorithm in ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"):
        yield {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": []}, {"entry": "modelopt"}


def _auto_round() -> Iterator[Sample]:
    for bits, group, sym, packing in itertools.product((4, 8), (128, 32), (True, False), ("gptq", "awq")):
        inc = {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": sym}
        yield {**inc, "packing_format": f"auto_round:auto_{packing}"}, {"entry": "inc"}
    for bits in (4, 8):
        inc = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": True, "data_type": "mx_fp"}
        yield {**inc, "packing_format": "auto_round:llm_compressor"}, {"entry": "inc"}


def _quarks() -> Iterator[Sample]:
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
    channel = {**fp8, "qscheme": "per_channel", "ch_axis": 0}
    yield _quark(fp8, fp8), {}
    yield _quark(fp8, {**fp8, "is_dynamic": True}), {}
    yield _quark(channel, {**channel, "is_dynamic": True, "ch_axis": 1}), {}
    for group, sym in itertools.product((128, 32), (True, False)):
        int4 = {"dtype": "int4" if sym else "uint4", "qscheme": "per_group", "group_size": group, "symmetric": sym}
        yield _quark({**int4, "ch_axis": -1, "is_dynamic": False}, None), {}
    mx = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"}
    mx |= {"symmetric": None, "ch_axis": -1}
    for inputs in (None, fp8, {**mx, "is_dynamic": True}):
        yield _quark(mx, inputs), {}
    mxfp8 = {**mx, "dtype": "fp8_e4m3"}
    yield _quark(mxfp8, {**mxfp8, "is_dynamic": True}), {}
    levels = [{**fp8, "dtype": "fp4", "qscheme": "per_group", "group_size": 16}, fp8]
    yield _quark(levels, levels), {}
    int8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True, "ch_axis": 0, "is_dynamic": False}
    yield _quark(int8, {**int8, "is_dynamic": True, "ch_axis": 1}), {}


# ------------------------------------------------------------------------------------------------ one method


def method_of(question: Mapping[str, Any]) -> Any:
    """Build the method object of a question, its layer's config and dtype, as vLLM does."""
    dtype = inside.set_config(question)
    name = inside._verify() or question["entry"]
    moe = inside.moe_config(question, dtype)
    unquantized: Any = importlib.import_module(f"{inside._MOE}.unquantized_fused_moe_method").UnquantizedFusedMoEMethod
    if question["qcfg"] is None:
        return _unquantized(unquantized, moe), None, moe, dtype
    config = inside._make_config(name, question)
    config.packed_modules_mapping = {}
    method = config.get_quant_method(inside.make_layer(moe), question["prefix"])
    return method or _unquantized(unquantized, moe), config, moe, dtype


def _unquantized(cls: Any, moe: Any) -> Any:
    import torch

    method = cls.__new__(cls)
    torch.nn.Module.__init__(method)
    method.moe = moe
    return method


def _layer_with_weights(question: Mapping[str, Any]) -> Any:
    """Create the parameters of a question's layer as small real tensors, ready for the layer's own loader."""
    import torch

    method, config, moe, dtype = method_of(question)
    layer = inside.make_layer(moe)
    experts = type(layer)
    layer.__dict__.pop("weight_loader", None)
    layer.quant_method, layer.quant_config = method, config
    layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
    layer._fused_shared_expert_quantizer = None
    layer._loaded_expert_biases = set()
    layer.expert_map_manager = inside.Loose(num_fused_shared_experts=0)

    def load(param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, **more: Any) -> Any:
        return experts.weight_loader(layer, param, loaded_weight, weight_name, shard_id, expert_id, **more)

    with torch.device("cpu"):
        method.create_weights(
            layer=layer, num_experts=_EXPERTS, hidden_size=question["hidden"], unpadded_hidden_size=question["hidden"],
            intermediate_size_per_partition=question["inter"], intermediate_size_full=question["inter"],
            params_dtype=dtype, weight_loader=load, global_num_experts=_EXPERTS,
        )  # fmt: skip
    layer.own_loader = load
    return layer


def _candidates(shape: tuple[int, ...], shard: str) -> Iterator[tuple[int, ...]]:
    """Yield shapes of one expert's stored tensor that could belong in a parameter of this shape."""
    if len(shape) <= 1 or (len(shape) == 2 and shape[1] <= 2):
        yield from ((), (1,))
    inner = list(shape[1:])
    for axis in range(len(inner)) if shard == "w1" else (None,):
        one = list(inner)
        if axis is not None:
            if one[axis] % 2:
                continue
            one[axis] //= 2
        yield tuple(one)
        yield tuple(reversed(one))
    yield tuple(inner)
    yield tuple(reversed(inner))


def _loaded_shape(layer: Any, name: str, param: Any, shard: str) -> list[int] | None:
    """Return the shape of the stored tensor that arrives complete in a parameter.

    None if no shape does, and if the method has a loader of its own, which converts what it loads.
    """
    import torch

    loader = getattr(param, "weight_loader", None)
    if loader is not layer.own_loader:
        return None
    for shape in dict.fromkeys(_candidates(tuple(param.shape), shard)):
        with torch.no_grad():
            param.data.view(torch.uint8).zero_() if param.dtype.itemsize == 1 else param.data.zero_()
            stored = torch.ones(shape, dtype=torch.float32).to(param.dtype)
            ok, error = inside.attempt(
                lambda stored=stored: loader(param, stored, f"experts.{name}", shard, 1, return_success=True)
            )
            arrived = int((param.data.to(torch.float32) == 1).sum())
        if error is None and ok is not False and arrived == stored.numel():
            return list(shape)
    return None


def _probe(question: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return parameter -> dtype, and the stored shapes of `w1` and `w2` that it loads."""
    layer = _layer_with_weights(question)
    found: dict[str, dict[str, Any]] = {}
    for name, param in layer.named_parameters():
        head, _, part = name.partition("_")
        if head not in ("w13", "w2") or not part or part.endswith("sort_indices"):  # which the method computes
            continue
        shape = _loaded_shape(layer, name, param, "w1" if head == "w13" else "w2")
        dtype = str(param.dtype).removeprefix("torch.")
        found[name] = {"dtype": dtype, "stored": shape}
    return found


def _expression(values: tuple[int, int], sizes: dict[str, tuple[int, int]], groups: dict[str, int]) -> str | None:
    """Write a dimension, known at two sizes, with N, K and the group sizes; None if nothing fits."""
    if values[0] == values[1]:
        return str(values[0])
    for name, (first, second) in sizes.items():
        if first * values[1] != second * values[0]:
            continue
        if first % values[0] == 0:
            divisor = first // values[0]
            group = next((word for word, size in groups.items() if size == divisor), str(divisor))
            return name if divisor == 1 else f"{name}/{group}"
        if (first * 32) % values[0] == 0:  # packed odd widths: K * bits / 32
            return f"{name}*{values[0] * 32 // first}/32"
    return None


def _formulas(
    probes: list[dict[str, dict[str, Any]]], group: int | None, block: tuple[int, int] | None
) -> dict[str, Any]:
    """Combine the probes at two sizes into formulas."""
    found: dict[str, Any] = {}
    for name, row in probes[0].items():
        (h1, i1), (h2, i2) = _SIZES
        sizes = {"N": (i1, i2), "K": (h1, h2)} if name.startswith("w13") else {"N": (h1, h2), "K": (i1, i2)}
        stored = [probe[name]["stored"] for probe in probes]
        if any(shape is None for shape in stored) or len(stored[0]) != len(stored[1]):
            found[name] = [row["dtype"], None]
            continue
        groups = {"G": group} if group and group > 0 and not block else {}
        shape = []
        for values in zip(*stored, strict=True):
            words = {**groups}
            if block:
                words = {"GN": block[0]} if values[0] * block[0] == sizes["N"][0] else {"G": block[1]}
            shape.append(_expression(values, sizes, words))
        found[name] = [row["dtype"], None if None in shape else shape]
    return found


# ------------------------------------------------------------------------------------------------ one version


def _moeq_method(version: str, config: dict[str, Any] | None, changes: Mapping[str, Any], device: str) -> Any:
    """Return moeq's own method for a sample: its key names the row."""
    hidden, inter = _SIZES[0]
    shape = MoeShape(
        hidden, inter, _EXPERTS, 2, activation=changes.get("act", "silu"), has_bias=changes.get("bias", False),
        model_type=changes.get("model_type", ""),
    )  # fmt: skip
    where = Deployment(parse_gpu(device), quantization=changes.get("user_quant"))
    return resolve(load_policy(f"vllm@{version}"), config or {}, shape, where).case.method


def _on_device(version: str, device: str) -> Iterator[Any]:
    for config, changes in samples():
        question = {**BASE, **changes, "qcfg": config, "experts": _EXPERTS}
        method = _moeq_method(version, config, changes, device)
        if not method.name:
            continue
        probes, failed = [], None
        for hidden, inter in _SIZES:
            sized = {**question, "hidden": hidden, "inter": inter}
            probe, failed = inside.attempt(_probe, json.loads(json.dumps(sized)))
            if failed:
                break
            probes.append(probe)
        made, _ = inside.attempt(lambda q=question: type(method_of(json.loads(json.dumps(q)))[0]).__name__)
        yield [key_of(method), made, failed or _formulas(probes, method.group_size, method.block)]


def extract(version: str, site: str) -> dict[str, Any]:
    """Return method key -> parameters for the version in `site`.

    Raises:
        MoeqError: `environment.engine` if it cannot be executed.
    """
    sandbox.preload()
    rows: dict[str, Any] = {}
    for device, world in _WORLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            rich = {**world, **RICH[world["kind"]]}

            def run(device: str = device, rich: dict[str, Any] = rich) -> Iterator[Any]:
                sandbox.install(site, rich)
                inside.prepare()
                sandbox.change_device(rich)
                sandbox.apply(rich)
                yield from _on_device(version, device)

            if not inside.in_fork(run, str(path)):
                raise MoeqError("environment.engine", f"vllm in {site} cannot be executed for {device}")
            for key, made, row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                if "error" in row:
                    print(f"{device} {key}: {row['error']}: {row['msg'][:150]} {row['at']}")
                elif made != key.partition("|")[0]:
                    print(f"{device} {key}: vLLM makes {made}")
                elif rows.setdefault(key, row) != row:
                    print(f"{device} {key}: differs from another device")
    return rows


def merged(known: Mapping[str, Any], version: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Put a version's rows into the data file; rows that several versions share are stored once."""
    by_version: dict[str, dict[str, Any]] = {}
    for key, rows in known.items():
        for row in rows:
            for one in row["versions"]:
                by_version.setdefault(one, {})[key] = row["parameters"]
    by_version[version] = dict(found)
    document: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(by_version, key=release):
        for key, parameters in by_version[one].items():
            rows = document.setdefault(key, [])
            same = next((row for row in rows if row["parameters"] == parameters), None)
            if same is None:
                rows.append({"versions": [one], "parameters": parameters})
            else:
                same["versions"].append(one)
    return dict(sorted(document.items()))
