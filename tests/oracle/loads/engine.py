"""Loads cases with vLLM's own classes, without a GPU, and records what happens.

    python tests/oracle/loads/engine.py SITE --seed S --cases N --out FILE.jsonl

For a Python with torch and what vLLM's Python files import, with moeq on PYTHONPATH; SITE is the folder of the unpacked
wheel. Everything is the engine's: reading the config, the model class, `create_weights`, the loader of files, and
`load_weights`. What is pretended is the device. Parts for images and the attention of some classes are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from oracle.loads import cases, files
from oracle.loads.models import LAYERS

from vllm_tables import inside, models, names, sandbox

Row = dict[str, Any]

CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0)}
#: What is left out of the engine's models, by module: parts for images, and the attention of some.
_LEFT_OUT = {
    "gpt_oss": ("OAIAttention",), "qwen3_vl": ("Qwen3_VisionTransformer",),
    "qwen3_vl_moe": ("Qwen3_VisionTransformer",), "glm4_1v": ("Glm4vVisionTransformer",),
    "gemma4": ("Gemma4Attention", "Gemma4MLP"), "gemma4_mm": ("AutoModel", "Gemma4MultimodalEmbedder"),
    "llama4": ("Llama4Attention", "LlamaMLP"), "mllama4": ("Llama4VisionModel", "Llama4MultiModalProjector"),
    "ernie45_vl_moe": ("Ernie4_5_VLMoeAttention", "Ernie4_5_VLMoeMLP"),
}  # fmt: skip
#: Ends of the names of routers, which some classes make without a linear layer.
_ROUTERS = (".gate", ".router", ".router.proj", "_experts_gate")
#: Parts of linear modules that a method may have and a file need not hold.
_UNNEEDED = re.compile(r"bias|g_idx|weight_shape|input|zero_point")
#: Parts of a file whose loss changes numbers.
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales", "qzeros", "scale")


def worlds() -> dict[str, Row]:
    """The pretended devices."""
    env = {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}  # a stream would need the device
    return {gpu: {"kind": "cuda", "cap": list(cap), "flags": {}, "env": env} for gpu, cap in CAPABILITIES.items()}


class _Taken:
    """Which tensors of experts reached a parameter.

    Attributes:
        current: name of the tensor that was read last.
        read: names by the address of a tensor's memory: some classes read all tensors before they load any.
        names: tensors that a loader of experts took, or left to another rank.
    """

    def __init__(self) -> None:
        self.current = ""
        self.read: dict[int, str] = {}
        self.names: set[str] = set()

    def watch(self, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same tensors, one after the other."""
        for self.current, tensor in tensors:
            self.read[tensor.untyped_storage().data_ptr()] = self.current
            yield self.current, tensor

    def take(self, tensor: Any) -> None:
        """Note that a loader got a tensor, or a part of it."""
        self.names.add(self.read.get(tensor.untyped_storage().data_ptr(), self.current))


TAKEN = _Taken()


def prepare(site: str) -> None:
    """Import vLLM on the pretended device and leave attention out of its models. Once a process."""
    import torch
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # is remembered: what follows is only there to be imported
    sys.meta_path.insert(0, sandbox._Finder({"xgrammar", "torchvision"}))
    sandbox.preload()
    sandbox.install(site, worlds()["H100"])
    models.define_operators()
    names.prepare()
    tilelang: Any = importlib.import_module("tilelang")
    tilelang.jit = lambda **named: lambda function: function  # decorates what is never called here
    torch.cuda.Event = torch.cuda.Stream = models.Idle  # type: ignore[assignment,misc]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN or the largest integer
    for module, classes in _LEFT_OUT.items():
        found: Any = importlib.import_module(f"vllm.model_executor.models.{module}")
        for name in classes:
            setattr(found, name, names.without_weights(name))
    found = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
    attention = names.without_weights("Attention")
    attention.wo_b = SimpleNamespace()  # is told what sequence parallelism changes
    found._select_dsv4_attn_cls = lambda *values: attention
    found.DeepseekV4MLP = names.without_weights("DeepseekV4MLP")
    experts: Any = importlib.import_module("vllm.model_executor.layers.fused_moe").RoutedExperts
    own = experts.weight_loader

    def load(self: Any, param: Any, loaded_weight: Any, *values: Any, **named: Any) -> Any:
        TAKEN.take(loaded_weight)
        return own(self, param, loaded_weight, *values, **named)

    experts.weight_loader = load
    loader: Any = importlib.import_module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader
    read = loader.get_all_weights
    loader.get_all_weights = lambda self, *values: TAKEN.watch(read(self, *values))


def _become(world: Row, scratch: str) -> None:
    """Take a world's device, and make the engine's process groups, each of which holds this process alone."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    sandbox.change_device(world)
    sandbox.apply(world)
    platform: Any = type(importlib.import_module("vllm.platforms").current_platform)
    platform.current_device = classmethod(lambda cls: torch.device("cpu"))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        names._one_rank(scratch)


def outcome(case: Row, folder: Path) -> Row:
    """What the engine does with a checkpoint: where it stops and how, or what it leaves unfilled and unread."""
    found: Row = {}
    TAKEN.names, TAKEN.read = set(), {}
    for stage, step in (("config", _config), ("build", _build), ("load", _load), ("process", _process)):
        _, failed = inside.attempt(step, case, folder, found)
        if failed:
            found |= {"stage": stage, **failed}
            break
    return {key: value for key, value in found.items() if not key.startswith("_")}


def _ranks(deployment: Row) -> None:
    """Be one of several ranks: groups of processes say so, and nothing is sent to the others."""
    import torch

    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    ranks, rank, copies, copy = (deployment[key] for key in ("tp", "rank", "dp", "dp_rank"))
    places = ((state._TP, ranks, rank), (state._DP, copies, copy), (state._EP, ranks * copies, copy * ranks + rank))
    for group, size, place in places:
        if group is not None:
            group.world_size, group.rank_in_group, group.rank = size, place, place
            group.device = torch.device("cpu")


def _config(case: Row, folder: Path, found: Row) -> None:
    from vllm.config import DeviceConfig, KernelConfig, LoadConfig, ModelConfig, VllmConfig

    deployment = case["deployment"]
    _ranks({"tp": 1, "rank": 0, "dp": 1, "dp_rank": 0})
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        quantization=deployment["quantization"],
    )  # fmt: skip
    whole = VllmConfig(
        model_config=model, device_config=DeviceConfig(device="cpu"), load_config=LoadConfig(use_tqdm_on_load=False),
        kernel_config=KernelConfig(moe_backend=deployment["backend"]),
    )  # fmt: skip
    whole.parallel_config.tensor_parallel_size = deployment["tp"]  # a record that is made so would look for devices
    whole.parallel_config.data_parallel_size = deployment["dp"]
    whole.parallel_config.data_parallel_rank = deployment["dp_rank"]
    whole.parallel_config.enable_expert_parallel = deployment["ep"]
    model.verify_with_parallel_config(whole.parallel_config)
    _ranks(deployment)
    found["quantization"], found["_config"] = model.quantization, whole


def _build(case: Row, folder: Path, found: Row) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    whole = found["_config"]
    with set_current_vllm_config(whole), set_default_torch_dtype(whole.model_config.dtype):
        model = initialize_model(whole)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    found |= {"_model": model, "_experts": experts}
    found["methods"] = sorted({inside.chosen(module.quant_method)["method"] for module in experts.values()})
    found["backends"] = sorted({str(inside.chosen(module.quant_method)["backend"]) for module in experts.values()})


def _load(case: Row, folder: Path, found: Row) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    linears = _linears(found["_model"], attention=any(".self_attn." in name for name in case["tensors"]))
    fresh, fresh_linears = _parameters(found["_experts"]), _parameters(linears)
    whole = found["_config"]
    with set_current_vllm_config(whole):
        DefaultModelLoader(whole.load_config).load_weights(found["_model"], whole.model_config)
    found["unfilled"] = {} if _has_fewer_features(case) else _unfilled(found["_experts"], fresh)
    found["linears"] = _untouched(linears, fresh_linears)
    found["lost"] = _lost(case, linears, whole.quant_config)
    further = f".layers.{LAYERS}."  # of multi-token prediction, which is a model of its own
    experts = {name for name in case["tensors"] if ".experts" in name and further not in name}
    # A class that reads all tensors first, and a loader that makes others of them: what it took is not known.
    unknown = "MoeWNA16Method" in found["methods"] and "llama4" in case["config"]["model_type"]
    left = set() if unknown else experts - TAKEN.names
    found["stale"] = sorted({*case["stale"]} & TAKEN.names)
    found["left"] = sorted({name.rpartition(".")[2] for name in left})


def _parameters(modules: Row) -> dict[tuple[str, str], Any]:
    """Copies of the parameters of modules, by module and name."""
    return {
        (name, part): param.detach().clone()
        for name, module in modules.items()
        for part, param in module.named_parameters()
        if param.device.type != "meta"
    }


def _unfilled(experts: Row, fresh: dict[tuple[str, str], Any]) -> dict[str, float]:
    """Parameters with the largest share of an expert's numbers that is as it was before loading."""
    import torch

    found: dict[str, float] = {}
    for (name, part), before in fresh.items():
        after = getattr(experts[name], part, None)
        if after is None or after.shape != before.shape or after.dtype != before.dtype or not after.numel():
            continue
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[after.element_size()]
        same = after.detach().reshape(-1).view(bits) == before.reshape(-1).view(bits)
        padding = _padding(experts[name].moe_config)
        weight = getattr(experts[name], f"{part.partition('_')[0]}_weight", None)
        if "scale" in part and weight is not None and not weight.detach().view(torch.uint8).any():
            continue  # a rank whose share is padding
        share = (float(same.view(after.shape[0], -1).float().mean(1).max()) - padding) / (1 - padding)
        if share >= 0.2:
            found[part] = max(found.get(part, 0.0), round(share, 2))
    return found


def _has_fewer_features(case: Row) -> bool:
    """Whether a rank gets fewer of gpt-oss's blocks of 32 features than others: the engine fills up with zeros."""
    where, ranks = case["deployment"], case["deployment"]["tp"] * case["deployment"]["dp"]
    blocks = case["config"].get("intermediate_size", 0) // 32
    rank = where["dp_rank"] * where["tp"] + where["rank"]
    return case["config"]["model_type"] == "gpt_oss" and not where["ep"] and (rank + 1) * -(-blocks // ranks) > blocks


def _linears(model: Any, *, attention: bool) -> Row:
    """Modules with a matrix that are no experts. Some cases are files without attention."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kinds = (LinearBase, VocabParallelEmbedding)
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, kinds) or name.endswith(_ROUTERS)) and ".experts." not in name
        if attention or "attn." not in name
    }


def _untouched(linears: Row, fresh: dict[tuple[str, str], Any]) -> list[str]:
    """Parameters of linear modules of which a tenth or more is as it was before loading."""
    import torch

    found = set()
    for (name, part), before in fresh.items():
        after = getattr(linears[name], part, None)
        if after is None or (after.shape, after.dtype) != (before.shape, before.dtype) or _UNNEEDED.search(part):
            continue
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[after.element_size()]
        same = after.detach().reshape(-1).view(bits) == before.reshape(-1).view(bits)
        if after.numel() and float(same.float().mean()) >= 0.1:
            found.add(f"{re.sub(r'^.*layers', '', name)}.{part}")
    return sorted(found)


def _lost(case: Row, linears: Row, config: Any) -> list[str]:
    """Scales of linear modules in the file that no parameter takes: their numbers are lost."""
    packed = dict(getattr(config, "packed_modules_mapping", None) or {})
    homes = {}
    for name, module in linears.items():
        above, _, leaf = name.rpartition(".")
        for shard in (leaf, *packed.get(leaf, ())):
            homes[_below(f"{above}.{shard}")] = module
    found = set()
    for name in case["tensors"]:
        module_name, _, part = name.rpartition(".")
        module = homes.get(_below(module_name))
        if part in _SCALES and module is not None and not hasattr(module, part):
            found.add(f"{_below(module_name)}.{part}")
    return sorted(found)


def _below(name: str) -> str:
    """A module's name from its layer on; the last part of one that lies in no layer."""
    return name.partition("layers.")[2] or name.rpartition(".")[2]


def _padding(moe: Any) -> float:
    """Share of an expert's numbers that the engine adds to the sizes of the file."""
    stored = moe.hidden_dim_unpadded * moe.intermediate_size_per_partition_unpadded
    return 1.0 - float(stored) / float(moe.hidden_dim * moe.intermediate_size_per_partition)


def _process(case: Row, folder: Path, found: Row) -> None:
    from vllm.config import set_current_vllm_config

    failures: dict[str, Exception] = {}
    with set_current_vllm_config(found["_config"]):
        for name, module in found["_experts"].items():
            try:
                module.quant_method.process_weights_after_loading(module)
            except Exception as error:  # noqa: BLE001 - a device may be missing for one layer, and the next has scales too
                failures[name] = error
        scales = [
            name
            for at, module in found["_experts"].items()
            for name in _bad_scales(module, processed=at not in failures)
        ]
        found["bad_scales"] = sorted(set(scales))
    if failures:
        raise next(iter(failures.values()))


def _bad_scales(module: Any, *, processed: bool) -> list[str]:
    """Scales of activations that the engine hands its kernel, of which some are no positive finite numbers.

    Where the missing device stops the method before it has taken the largest scale of all, only numbers count that
    no larger one hides.
    """
    import torch

    made, _ = inside.attempt(module.quant_method.get_fused_moe_quant_config, module)
    scales = {name: getattr(made, name, None) for name in ("a1_scale", "a2_scale", "a1_gscale", "a2_gscale")}
    tensors = {name: scale.float() for name, scale in scales.items() if isinstance(scale, torch.Tensor)}
    if not processed:  # a zero is the reciprocal of an infinite scale
        return [name for name, scale in tensors.items() if scale.isnan().any() or ("g" in name and not scale.all())]
    return [name for name, scale in tensors.items() if not bool((scale.isfinite() & (scale > 0)).all())]


def rows(site: str, seed: str, numbers: range) -> Iterator[Row]:
    """Case number and outcome of a seed's cases, device by device, each in a fork: predicates are cached."""
    prepare(site)
    with tempfile.TemporaryDirectory() as scratch:
        for gpu, world in worlds().items():
            path = Path(scratch, f"{gpu}.jsonl")

            def work(gpu: str = gpu, world: Row = world) -> Iterator[Row]:
                _become(world, tempfile.mkdtemp(dir=scratch))
                for number in numbers:
                    case = cases.case(seed, number)
                    if case["deployment"]["gpu"] == gpu:
                        folder = files.write(Path(scratch, f"{gpu}-{number}"), case)
                        with contextlib.redirect_stdout(io.StringIO()):
                            yield {"id": number, "engine": outcome(case, folder)}
                        shutil.rmtree(folder)

            if not inside.in_fork(work, str(path)):
                raise SystemExit(f"the engine's side died on {gpu}")
            yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Record a seed's outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as out:
        for row in rows(args.site, args.seed, range(args.first, args.first + args.cases)):
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
