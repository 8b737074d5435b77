"""What runs inside vLLM: a question's parts as vLLM's own objects, and its decision stage by stage.

For the extractor and the differential test, after `sandbox.install`. A question is a plain dict: `hidden`, `inter`,
`experts`, `topk`, `act`, `routing`, `router_fp32`, `hash_routing`, `bias`, `swiglu_limit`, `tp`, `dp`, `ep`, `a2a`,
`eplb`, `lora`, `dtype`, `override`, `model_type`, `prefix`, `qcfg` (the checkpoint's config), `user_quant` and
`entry`; `pcp` and `redundant` (experts) where they are not 1 and 0.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Question = Mapping[str, Any]

#: Selection functions' modules, in every version that has them.
FAMILIES = ("int_wna16", "int8", "mxfp4", "fp8", "nvfp4", "mxfp8", "unquantized", "w4a8", "w4a8_int8")
_MOE = "vllm.model_executor.layers.fused_moe"


class Loose(types.SimpleNamespace):
    """A config object of which only some attributes were set: the others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


CONFIG = Loose()  # what vLLM's code sees as the current config
REASONS: list[str] = []  # what selection says about the candidates that it passes over


class _Recorder:
    def debug_once(self, text: str, *args: Any, **kwargs: Any) -> None:
        REASONS.append(str(text) % args if args else str(text))

    debug = debug_once

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def family(name: str) -> Any:
    """A selection function's module, or None where the version has none."""
    try:
        return importlib.import_module(f"{_MOE}.oracle.{name}")
    except ImportError:
        return None


def prepare() -> None:
    """Import the decision code and put its surroundings in place. Once, after `sandbox.install`."""
    config: Any = importlib.import_module("vllm.config")
    inner: Any = importlib.import_module("vllm.config.vllm")
    for module in (config, inner):
        module.get_current_vllm_config = lambda: CONFIG
        module.get_current_vllm_config_or_none = lambda: CONFIG
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    for name in quantization.QUANTIZATION_METHODS:
        with contextlib.suppress(Exception):
            quantization.get_quantization_config(name)
    method: Any = importlib.import_module(f"{_MOE}.unquantized_fused_moe_method").UnquantizedFusedMoEMethod

    def select_only(self: Any, moe: Any) -> None:
        self.moe = moe
        self.unquantized_backend, self.experts_cls = family("unquantized").select_unquantized_moe_backend(moe)

    method.__init__ = select_only
    for name in FAMILIES:
        module = family(name)
        if module is not None:
            module.logger = _Recorder()
    with contextlib.suppress(Exception):  # an operator, made beside the decision
        marlin: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
        marlin.get__quant_fp8_method = lambda: None


#: What `ParallelConfig` checks beside the sizes of a question.
_ONE_HOST = {
    "_api_process_rank": 0,
    "_api_process_count": 1,
    "data_parallel_size_local": 1,
    "decode_context_parallel_size": 1,
}


def set_config(question: Question) -> Any:
    """Make a question vLLM's current config. Returns the torch dtype of activations."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[question["dtype"]]
    hf = Loose(model_type=question["model_type"], quantization_config=question["qcfg"], num_hidden_layers=64)
    hf.expert_dtype = question.get("expert_dtype") or "fp4"  # what the engine reads where a model does not say
    CONFIG.__dict__.clear()
    CONFIG.__dict__.update(
        model_config=Loose(
            quantization_config=None,
            hf_config=hf,
            hf_text_config=hf,
            dtype=dtype,
            quantization=question["user_quant"],
            model_arch_config=Loose(quantization_config=question["qcfg"]),
        ),
        lora_config=object() if question["lora"] else None,
        kernel_config=Loose(moe_backend=question["override"]),
        scheduler_config=Loose(max_num_batched_tokens=8192),
        parallel_config=Loose(
            tensor_parallel_size=question["tp"],
            data_parallel_size=question["dp"],
            enable_expert_parallel=question["ep"],
            all2all_backend=question["a2a"],
            prefill_context_parallel_size=question.get("pcp", 1),
            enable_eplb=question["eplb"],
            eplb_config=Loose(num_redundant_experts=question.get("redundant", 0)),
            enable_dbo=False,
            **_ONE_HOST,
        ),
        compilation_config=Loose(max_cudagraph_capture_size=512),
        device_config=Loose(device="cpu"),
    )
    return dtype


@cache
def _layer_modules() -> tuple[Any, Any, Any]:
    """VLLM's modules of layer configs, activations and ranks, with rank 0 of everything."""
    config: Any = importlib.import_module(f"{_MOE}.config")
    config.get_dp_group = config.get_pcp_group = lambda: Loose(rank_in_group=0)
    config.get_tensor_model_parallel_rank = lambda: 0
    activation: Any = importlib.import_module(f"{_MOE}.activation").MoEActivation
    return config, activation, importlib.import_module("vllm.distributed.parallel_state")


def parallel_config(question: Question) -> Any:
    """VLLM's own arithmetic of ranks."""
    config, _, state = _layer_modules()
    state._TP = Loose(world_size=question["tp"], rank_in_group=0)
    return config.FusedMoEParallelConfig.make(
        tp_size_=question["tp"],
        pcp_size_=question.get("pcp", 1),
        dp_size_=question["dp"],
        sp_size_=question["tp"] if _splits_sequences(question["model_type"]) else 1,
        vllm_parallel_config=CONFIG.parallel_config,
    )


#: Model types whose class lies in the module of another one.
_MODULES = {"deepseek_v3": "deepseek_v2", "kimi_k2": "deepseek_v2"}


def _splits_sequences(model_type: str) -> bool:
    """Whether the deployment splits sequences over tensor-parallel ranks, and the model's class tells its experts."""
    config: Any = importlib.import_module("vllm.config.parallel").ParallelConfig
    if not config.use_sequence_parallel_moe.fget(CONFIG.parallel_config):
        return False
    folder = importlib.import_module("vllm.model_executor.models").__path__[0]
    source = Path(folder, f"{_MODULES.get(model_type, model_type)}.py")
    return source.exists() and "use_sequence_parallel_moe" in source.read_text(encoding="utf-8")


def check_ranks(question: Question) -> None:
    """Run the checks of `ParallelConfig`, and the one about even shares in `FusedMoE`.

    Raises:
        ValueError: what the engine raises.
    """
    module: Any = importlib.import_module("vllm.config.parallel")
    config = module.ParallelConfig
    if question["a2a"] not in typing.get_args(module.All2AllBackend):
        raise ValueError(f"all2all_backend {question['a2a']}")  # pydantic's check
    config.__pydantic_decorators__.model_validators["_validate_parallel_config"].func(CONFIG.parallel_config)
    parallel, source = parallel_config(question), inspect.getsource(importlib.import_module(f"{_MOE}.layer"))
    total = question["experts"] + question.get("redundant", 0)
    names = {"enable_eplb": question["eplb"], "global_num_experts": total, "moe_parallel_config": parallel}
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "enable_eplb":
            statement.body = [part for part in statement.body if "EplbLayerState" not in ast.unparse(part)]
            statement.orelse = []
            exec(compile(ast.Module([statement], []), "layer.py", "exec"), names)


def moe_config(question: Question, dtype: Any) -> Any:
    """The layer's `FusedMoEConfig`. Older versions take the intermediate size per rank."""
    import torch

    config, activation, _ = _layer_modules()
    parallel = parallel_config(question)
    experts = question["experts"] + question.get("redundant", 0)
    fields = {
        "num_experts": experts,
        "experts_per_token": question["topk"],
        "hidden_dim": question["hidden"],
        "intermediate_size": question["inter"],
        "num_local_experts": -(-experts // parallel.ep_size),
        "num_logical_experts": question["experts"],
        "activation": activation.from_str(question["act"]),
        "device": "cpu",
        "routing_method": getattr(config.RoutingMethodType, question["routing"]),
        "moe_parallel_config": parallel,
        "in_dtype": dtype,
        "router_logits_dtype": torch.float32 if question["router_fp32"] else None,
        "moe_backend": question["override"],
        "has_bias": question["bias"],
        "is_lora_enabled": question["lora"],
        "swiglu_limit": question["swiglu_limit"],
        "has_hash_routing": question["hash_routing"],
    }
    known = config.FusedMoEConfig.__dataclass_fields__
    if "intermediate_size" not in known:
        assert question["inter"] % parallel.tp_size == 0
        fields["intermediate_size_per_partition"] = question["inter"] // parallel.tp_size
    return config.FusedMoEConfig(**{key: value for key, value in fields.items() if key in known})


def make_layer(moe: Any) -> Any:
    """The experts' module, with the attributes that quantisation methods read."""
    import torch

    experts: Any = importlib.import_module(_MOE).RoutedExperts
    layer = experts.__new__(experts)
    torch.nn.Module.__init__(layer)
    attributes = {
        "moe_config": moe,
        "ckpt_gate_proj_name": "gate_proj",
        "ckpt_down_proj_name": "down_proj",
        "ckpt_up_proj_name": "up_proj" if moe.is_act_and_mul else None,
        "activation": moe.activation,
        "weight_loader": lambda *a, **k: None,
        "hidden_size": moe.hidden_dim,
        "intermediate_size_per_partition": moe.intermediate_size_per_partition,
        "layer_name": "model.layers.0.mlp.experts",
        "params_dtype": moe.in_dtype,
        "renormalize": True,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "swiglu_limit": getattr(moe, "swiglu_limit", None),
        "rocm_aiter_fmoe_enabled": getattr(moe, "rocm_aiter_fmoe_enabled", False),
        "top_k": moe.experts_per_token,
        "global_num_experts": moe.num_experts,
        "local_num_experts": moe.num_local_experts,
        **dict.fromkeys(("apply_router_weight_on_input", "use_grouped_topk"), False),
        **dict.fromkeys(
            ("quant_config", "swiglu_alpha", "swiglu_beta", "num_expert_group", "topk_group",
             "custom_routing_function", "e_score_correction_bias")
        ),
    }  # fmt: skip
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


# ------------------------------------------------------------------------------------------------ one decision


def failure(error: BaseException) -> dict[str, Any]:
    """Type, text and place of an error in vLLM's tree."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/vllm/" in f.filename]
    places = [f"vllm/{f.filename.rpartition('/vllm/')[2]}:{f.name}:{f.lineno}" for f in frames]
    at = places[-1] if places else None
    return {"error": type(error).__name__, "msg": str(error)[:300], "at": at, "frames": places[-6:]}


def attempt(step: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, Any] | None]:
    """A stage's result, or what it fails with."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return step(*args), None
    except Exception as error:  # noqa: BLE001  (whatever vLLM raises is the answer)
        return None, failure(error)


def _read_variables() -> None:
    """Read the variables that are set, as `envs.enable_envs_cache` does when the engine starts."""
    envs: Any = importlib.import_module("vllm.envs")
    for name in set(os.environ) & set(envs.environment_variables):
        envs.environment_variables[name]()


def _verify() -> Any:
    from vllm.config.model import ModelConfig

    fake = CONFIG.model_config
    with contextlib.suppress(ImportError, AttributeError):  # not in every version
        convert: Any = importlib.import_module("vllm.transformers_utils.model_arch_config_convertor")
        convert.ModelArchConfigConvertorBase._normalize_quantization_config(None, fake.hf_config)
    ModelConfig._verify_quantization(fake)
    return fake.quantization


def _online_config(name: str) -> Any:
    """The config of a checkpoint that has none: the engine looks for a file, or quantises while it loads."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    found = CONFIG.model_config
    with tempfile.TemporaryDirectory() as folder:
        arguments = resolve_quantization_config(found.quantization, None)
        model = Loose(
            quantization=name, quantization_config=arguments, hf_config=Loose(), hf_overrides={}, model=folder
        )
        return get_quant_config(model, Loose())


def _make_config(name: str, question: Question) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    if question["qcfg"] is None:
        return _online_config(name)
    return get_quantization_config(name).from_config(question["qcfg"])


_BACKENDS = (
    "wna16_moe_backend", "wna16_backend", "mxfp4_backend", "int8_backend", "fp8_backend", "nvfp4_backend",
    "w4a8_backend", "w4a8_int8_backend", "mxfp8_backend", "unquantized_backend", "backend",
)  # fmt: skip


def chosen(method: Any) -> dict[str, Any]:
    """A method object's class, backend and experts class."""
    backend = next((getattr(method, name) for name in _BACKENDS if hasattr(method, name)), None)
    cls = getattr(method, "experts_cls", None)
    experts = cls.__name__ if cls else None
    word = getattr(backend, "name", None if backend is None else str(backend))
    if word is None and (experts or "").startswith(("Humming", "BatchedHumming")):
        word = "HUMMING"  # its method has one backend and no name for it
    return {"method": type(method).__name__, "backend": word, "experts": experts}


def decide(question: Question) -> dict[str, Any]:
    """Everything vLLM decides about a question, stage by stage; a failing stage does not hide the later ones."""
    REASONS.clear()
    out: dict[str, Any] = {}
    _decide(json.loads(json.dumps(question)), out)
    out["why_not"] = [text[:260] for text in REASONS[:24]]
    return out


def _decide(question: Question, out: dict[str, Any]) -> None:
    from vllm.platforms import current_platform

    dtype = set_config(question)
    out["variables"] = attempt(_read_variables)[1]
    out["ranks"] = attempt(check_ranks, question)[1]
    name, out["verify"] = attempt(_verify)
    name = out["name"] = name or question["entry"]
    capability = current_platform.get_device_capability()
    moe, out["shape"] = attempt(moe_config, question, dtype)
    if moe is None:
        return
    unquantized: Any = importlib.import_module(f"{_MOE}.unquantized_fused_moe_method").UnquantizedFusedMoEMethod
    if question["qcfg"] is None and question["user_quant"] is None:
        method, out["select"] = attempt(unquantized, moe)
    else:
        config, out["config"] = attempt(_make_config, name, question)
        if config is None:
            return
        least = config.get_min_capability()
        out["capability"] = bool(capability is None or capability.to_int() >= least)
        out["dtype"] = dtype in config.get_supported_act_dtypes()
        config.packed_modules_mapping = {}
        method, out["select"] = attempt(config.get_quant_method, make_layer(moe), question["prefix"])
        if method is None and out["select"] is None:
            method, out["select"] = attempt(unquantized, moe)
    if method is not None:
        out["chosen"] = chosen(method)
        _finish(question, moe, method, dtype, out)


def _finish(question: Question, moe: Any, method: Any, dtype: Any, out: dict[str, Any]) -> None:
    """What follows selection: sizes, load balancing, weight creation, validation of the kernel."""
    import torch

    sizes, bad = attempt(
        method.maybe_roundup_sizes, moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype,
        moe.moe_parallel_config,
    )  # fmt: skip
    out["sizes"] = bad or list(sizes)
    if question["eplb"]:
        supported, wrong = attempt(lambda: bool(method.supports_eplb))
        out["eplb"] = wrong or supported
    if bad is None:
        moe.hidden_dim, moe.intermediate_size_per_partition = sizes
        layer = make_layer(moe)

        def create() -> None:
            with torch.device("meta"):
                method.create_weights(
                    layer=layer, num_experts=moe.num_local_experts, hidden_size=sizes[0],
                    unpadded_hidden_size=question["hidden"], intermediate_size_per_partition=sizes[1],
                    params_dtype=dtype, weight_loader=lambda *a, **k: None, global_num_experts=moe.num_experts,
                )  # fmt: skip

        out["create"] = attempt(create)[1]
    validate = getattr(family("mxfp4"), "_validate_mxfp4_experts_config", None)
    if out["chosen"]["method"].endswith("Mxfp4MoEMethod") and hasattr(method, "mxfp4_backend") and validate:
        out["validate"] = attempt(validate, method.experts_cls, moe, method.mxfp4_backend)[1]


def in_fork(work: Callable[[], Any], path: str) -> bool:
    """Run `work` in a fork of this process, its JSON rows into `path`: what it caches is gone afterwards."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    code = 1
    try:
        with open(path, "w", encoding="utf-8") as out:
            for row in work():
                out.write(json.dumps(row) + "\n")
        code = 0
    except BaseException:  # noqa: BLE001  (the parent sees the exit status)
        traceback.print_exc()
    os._exit(code)
