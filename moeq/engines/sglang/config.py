"""Serve converted checkpoints in SGLang (0.5.23): the quantisation method `moeq`, and the MoE runner of that name.

Experts are created in their converted shapes, filled from the files with the bytes of this rank, and run in moeq's
kernels. With `--quantization moeq` the checkpoint may be a source, which is packed while it is loaded. Other layers
keep the method that the source's config asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices, add_quantization_method_choices
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, get_moe_a2a_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_model, get_server_args, get_spec

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.options import make_deployment
from moeq.engines.choice import engine_options
from moeq.engines.converted_config import NAME, ConvertedQuantization, layer_number, source_unread
from moeq.engines.experts_source import ExpertsSource, PackingExpertsSource, open_experts
from moeq.engines.packed_method import PackedMethod
from moeq.engines.sglang.model_weights import register_hooks
from moeq.errors import MoeqError
from moeq.load.kernel_experts import dummy_parts, prepared_layer
from moeq.load.ranks import Rank, plan_places, plan_rank
from moeq.load.torch_loader import check_groups, check_kernel, device_arch, uneven_unit
from moeq.load.warmup import make_ready
from moeq.oracle.loaders import TRANSFORMERS_GUARD
from moeq.oracle.versions import BUILTIN
from moeq_kernels.activations import BY_ENGINE_NAME

if TYPE_CHECKING:
    from moeq.update.layers import RankTensors
    from moeq_kernels import PreparedLayer

logger = logging.getLogger(__name__)

#: Largest number of tokens in a step of the engine if its options do not say.
USUAL_TOKENS = 16384

#: Values of `--load-format` with which the engine reads tensors through `load_others`, or reads none.
LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")


def register_config() -> None:
    """Register method, runner and loader with the engine. Further calls have no effect."""
    if NAME in QUANTIZATION_METHODS:
        return
    QUANTIZATION_METHODS[NAME] = MoeqConfig
    add_quantization_method_choices([NAME])
    add_moe_runner_backend_choices([NAME])
    register_moe_runner_core(NAME, MoeqRunnerCore)
    register_hooks()
    shared = "sglang.srt.layers.moe.utils.resolve_shared_experts_config"
    HookRegistry.register(shared, keep_shared_experts, HookType.AROUND)


def keep_shared_experts(resolve: Callable[..., Any], model_class: Any, hf_config: Any, quant_config: Any) -> Any:
    """Wrap the engine's decision to fuse shared experts with routed ones, but never with converted ones."""
    if not isinstance(quant_config, MoeqConfig):
        return resolve(model_class, hf_config, quant_config)
    with get_exec().moe.override(disable_shared_experts_fusion=True):
        return resolve(model_class, hf_config, quant_config)


class MoeqConfig(ConvertedQuantization, QuantizationConfig):  # type: ignore[misc]
    """Quantisation config `moeq` in SGLang."""

    def __init__(self, original: dict[str, Any] | None, *, converted: bool = True) -> None:
        super().__init__(original, converted=converted)
        self._experts: ExpertsSource | None = None
        if self.inner is not None:
            self.packed_modules_mapping = self.inner.packed_modules_mapping

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MoeqConfig:
        """Make the config from `config.json`. What the engine has added goes to the source's config, too."""
        whole: Any = config.get("hf_config")
        if getattr(whole, "_experts_implementation", None) == TRANSFORMERS_GUARD:
            whole._experts_implementation = "eager"  # some of the engine's classes are transformers'
        if config.get("quant_method") != NAME:
            return cls(config, converted=False)
        if not (original := config.get("original")):
            return cls(None)
        return cls(original | {key: config[key] for key in ("packed_modules_mapping", "hf_config") if key in config})

    @staticmethod
    def source_config(original: dict[str, Any]) -> Any:
        kinds = [kind for kind in QUANTIZATION_METHODS.values() if kind is not MoeqConfig]
        better = (kind.override_quantization_method(original, None) for kind in kinds)
        method = next(filter(None, better), original["quant_method"])
        try:
            return get_quantization_config(method).from_config(dict(original))
        except ValueError as error:
            raise source_unread(method, "SGLang", error) from error

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPU with kernels; the manifest says which GPU is needed."""
        return 80

    def get_scaled_act_names(self) -> list[str]:
        """Return no names: no activation is scaled."""
        return []

    @property
    def kv_cache_quant_algo(self) -> str | None:
        """KV-cache algorithm if the source stores its scales."""
        return getattr(self.inner, "kv_cache_quant_algo", None)

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        """Tell the source's config which of its layers the model fuses."""
        super().update_packed_modules_mapping(mapping)
        if self.inner is not None:
            self.inner.update_packed_modules_mapping(mapping)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the modules in the source's config as the engine names them."""
        if self.inner is not None:
            self.inner.apply_weight_name_mapper(hf_to_sglang_mapper)

    def can_fuse_shared_expert(self) -> bool:
        """Return False: shared experts are not converted, so they cannot run as one more converted expert."""
        return False

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Return `moeq` for a checkpoint of any method if the user asks for it: `--quantization moeq`."""
        return NAME if user_quant == NAME else None

    def experts(self, layer: Any, draft: bool) -> ExpertsSource | None:
        """Open the served checkpoint once, and decide how a source is packed for the ranks of a layer.

        Raises:
            MoeqError: `usage.not-converted`, `source.*`, and for a source the errors of `convert`.

        Returns None for draft layers in the same checkpoint: they were copied unchanged, and some models count them
        from 0.
        """
        where, revision = get_model().model_path, get_model().revision
        if draft:
            drafter = get_spec().speculative_draft_model_path
            if drafter in (None, where):
                return None
            where, revision = drafter, get_spec().speculative_draft_model_revision
        if self._experts is None:
            self._experts = open_experts(where, revision, logger, converted=self.converted)
        if isinstance(self._experts, PackingExpertsSource):
            self._experts.decide(_deployment(layer), engine_options(None).prove)
            if self.unread is not None:
                raise self.unread
        return self._experts

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return moeq's method for converted experts, and the source's for all other layers."""
        # Some classes give their experts no name.
        number = layer_number(prefix) if prefix else getattr(layer, "layer_id", None)
        if isinstance(layer, FusedMoE) and number is not None:
            experts = self.experts(layer, layer.is_draft)
            entry = None if experts is None else experts.entry(number)
            if experts is not None and entry is not None:
                return MoeqMoEMethod(experts, entry)
        if self.inner is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return self.inner.get_quant_method(layer, prefix)


@dataclass
class MoeqQuantInfo(MoeQuantInfo):  # type: ignore[misc]
    """Prepared layer, as the engine hands it to the runner."""

    layer: PreparedLayer


class MoeqRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """Runner of a layer on tokens from the dispatcher."""

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        """Name of the runner, `moeq`."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: MoeqQuantInfo, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> StandardCombineInput:
        """Run the experts on tokens `[M, H]` and return weighted sums `[M, H]`. Ids are local numbers, or -1."""
        x, choices = dispatch_output.hidden_states, dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(choices):
            choices = choices.to_standard()
        weights, ids, layer = choices.topk_weights, choices.topk_ids, quant_info.layer
        scale = runner_config.routed_scaling_factor
        if scale is not None and not runner_config.apply_router_weight_on_input:
            weights = weights * scale
        # A prompt that is not cut into chunks may be longer than the layer was prepared for.
        starts = range(0, max(1, x.shape[0]), layer.max_tokens)
        parts = [layer(*(one[start : start + layer.max_tokens] for one in (x, weights, ids))) for start in starts]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if scale is not None and runner_config.apply_router_weight_on_input:
            y = y * scale
        return StandardCombineInput(y)


class MoeqMoEMethod(PackedMethod, FusedMoEMethodBase):  # type: ignore[misc]
    """Method for the experts of one layer."""

    def __init__(self, experts: ExpertsSource, entry: LayerEntry) -> None:
        self.experts = experts
        self.entry = entry
        self.activations = engine_options(None).activations
        self.runner: MoeRunner | None = None
        self.info: MoeqQuantInfo | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create parameters with the names and shapes of the converted tensors of this rank.

        Raises MoeqError `usage.*`, `answer.no-kernel` if files or kernels do not serve this deployment.
        """
        if layer.num_fused_shared_experts:
            raise MoeqError(
                "usage.fused-shared-experts",
                f"layer {self.entry.layer}: shared experts are to run as one more of the converted experts",
                "start with --disable-shared-experts-fusion",
            )
        if get_moe_a2a_backend().value != "none":
            raise MoeqError(
                "answer.no-kernel",
                f"moeq's kernels take tokens by rows, not from --moe-a2a-backend {get_moe_a2a_backend().value}",
                "start without --moe-a2a-backend",
            )
        _check_options()
        check_kernel(self.entry, params_dtype, "bf16")
        rank = self.rank = Rank(layer.moe_tp_rank, layer.moe_tp_size, layer.moe_ep_rank, layer.moe_ep_size)
        self.places = _places(layer, num_experts)
        if self.places is None:
            self.parts = [plan_rank(self.entry, rank, uneven_unit(self.experts.checkpoint, self.entry.layer))]
        else:
            self.parts = plan_places(self.entry, rank, self.places())
            self.experts.check_parts(self.entry, self.parts, rank)
        check_groups(self.entry, self.part)
        if self.folds_scales and self.places is not None:
            raise MoeqError(
                "usage.eplb",
                f"layer {self.entry.layer}: beside e4m3 activations moeq's kernels keep scales that no load balancing "
                "would move",
                "start without MOEQ_ACTIVATIONS=fp8, or with all experts in their places",
            )
        if self.num_held != num_experts:
            raise MoeqError(
                "usage.ep",
                f"layer {self.entry.layer}: {rank.title} holds {num_experts} experts in the engine and {self.num_held} "
                "by moeq",
                "start without --ep-num-redundant-experts",
            )
        self.create_parameters(layer, params_dtype)

    def create_moe_runner(self, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the engine's runner around `MoeqRunnerCore`."""
        if moe_runner_config.no_combine:
            raise MoeqError("answer.no-kernel", "moeq's kernels sum a token's experts, and the model asks for each")
        self.config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)

    def get_moe_quant_info(self, layer: Any, runner_backend: MoeRunnerBackendLike) -> MoeQuantInfo:
        """Refuse adapters on experts: the engine calls this for nothing else."""
        raise MoeqError(
            "answer.no-kernel",
            f"layer {self.entry.layer}: moeq's kernels take no adapters on experts, and no others read these bytes",
            "start with --lora-target-modules that name no expert, or serve the source",
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Fill the parameters from the files and get the kernels ready. Calls after a weight update do nothing."""
        if self.info is not None:
            return
        tensors = {name: tensor.data for name, tensor in layer.named_parameters() if name.startswith(STACKED_ROLES)}
        device = layer.w13_weight.device
        if device.type == "cuda":
            self.experts.require_arch(device_arch(device))
        if get_server_args().load_format == "dummy":
            dummy_parts(tensors)
        else:
            if self.experts.begins_filling and self.prepares_unfilled:
                make_ready(self.prepared(tensors), logger, wait=False)
            self.experts.fill(self.entry, self.parts, self.rank, tensors)
        prepared = self.prepared(tensors)
        make_ready(prepared, logger, wait=not self.experts.is_filling)
        self.info = MoeqQuantInfo(prepared)

    def served(self, layer: Any) -> RankTensors:
        """Return the packed tensors that kernels read."""
        return self.parts_of(dict(layer.named_parameters()))

    def held(self, layer: Any) -> tuple[int, ...] | None:
        """Return the expert of every row of these tensors if load balancing moves them, else None."""
        return None if self.places is None else self.places()

    def check_reload(self, layer: Any) -> None:
        """Accept every layer: kernels read the packed tensors and nothing else."""

    def prepared(self, tensors: Mapping[str, torch.Tensor], gpu: str | None = None) -> PreparedLayer:
        """Prepare the layer for the GPU that holds its tensors, or for another one by name."""
        return prepared_layer(
            self.packed(tensors),
            top_k=self.config.top_k or self.experts.checkpoint.info.top_k,  # some classes leave it out
            max_tokens=_max_tokens(),
            dtype=self.config.params_dtype,
            hidden_size=self.config.hidden_size,
            router_weight_on_input=self.config.apply_router_weight_on_input,
            gpu=gpu,
            **activation_arguments(self.config),
        )

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Run the routed experts on the tokens of the dispatcher."""
        assert self.runner is not None  # the engine makes it before it calls
        return self.runner.run(dispatch_output, self.info)


def activation_arguments(config: MoeRunnerConfig) -> dict[str, Any]:
    """Return the kernels' arguments for a layer's activation and its constants.

    Raises MoeqError `answer.no-kernel` for an activation that they do not compute.
    """
    if config.activation == "situ":
        alpha = 4.0 if config.gemm1_alpha is None else config.gemm1_alpha
        return {"activation": "situ", "alpha": alpha, "limit": config.gemm1_clamp_limit}
    if config.is_gated and config.gemm1_alpha is not None:
        beta = 1.0 if config.gemm1_beta is None else config.gemm1_beta
        limit = config.gemm1_clamp_limit
        return {"activation": "swiglu_oai", "alpha": config.gemm1_alpha, "beta": beta, "limit": limit}
    name = BY_ENGINE_NAME.get(config.activation if config.is_gated else f"{config.activation}_no_mul")
    if name is None:
        raise MoeqError("answer.no-kernel", f"moeq's kernels do not compute the activation {config.activation}")
    if name == "silu" and config.is_gated and config.gemm1_clamp_limit is not None:  # clamped after the sigmoid
        return {"activation": "swiglu_step", "limit": config.gemm1_clamp_limit}
    return {"activation": name, "limit": config.swiglu_limit if config.is_gated and name == "silu" else None}


def _deployment(layer: Any) -> Deployment:
    """Describe the deployment of a source for moeq's kernels: SGLang's own runners read no layout of moeq."""
    ranks = {"tp": layer.moe_tp_size} if layer.moe_ep_size == 1 else {"ep": layer.moe_ep_size}
    dtype = "fp16" if torch.get_default_dtype() is torch.float16 else "bf16"  # models are built under their dtype
    return make_deployment({"engine": BUILTIN, "dtype": dtype, **ranks})


def _places(layer: Any, held: int) -> Callable[[], tuple[int, ...]] | None:
    """Return a function that says which expert each row of this rank holds; None if all experts stay in order."""
    moe = get_exec().moe
    moved = moe.enable_eplb or moe.init_expert_location != "trivial" or moe.ep_num_redundant_experts > 0
    if not moved or not layer.uses_expert_location:
        return None
    rows = slice(layer.moe_ep_rank * held, (layer.moe_ep_rank + 1) * held)

    def places() -> tuple[int, ...]:
        record = get_global_expert_location_metadata()
        if record is None:
            raise MoeqError(
                "usage.eplb",
                f"SGLang does not say where the experts of layer {layer.layer_id} are: it moves none of this model",
                "start without --enable-eplb, --init-expert-location and --ep-num-redundant-experts",
            )
        return tuple(record.physical_to_logical_map_cpu[layer.layer_id, rows].tolist())

    return places


def _check_options() -> None:
    """Raise MoeqError `usage.load-format` or `usage.offload` if experts would not be at the kernels' addresses."""
    option = get_server_args().load_format
    if option not in LOAD_FORMATS:
        raise MoeqError(
            "usage.load-format",
            f"--load-format {option} does not read the folder's tensors as they are, so the plug-in would not see them",
            f"start with --load-format {', '.join(LOAD_FORMATS[:-1])} or {LOAD_FORMATS[-1]}",
        )
    offload = get_exec().offload
    if offload.cpu_offload_gb > 0 or offload.offload_group_size > 0:
        raise MoeqError(
            "usage.offload",
            "moeq's kernels keep the addresses of converted experts, and the engine's offloading moves them",
            "start without --cpu-offload-gb and --offload-group-size",
        )


def _max_tokens() -> int:
    """Return the largest number of tokens in a step: a chunk of prompts for every rank of data parallelism."""
    arguments = get_server_args()
    chunk = getattr(arguments, "chunked_prefill_size", None) or 0
    prefill = getattr(arguments, "max_prefill_tokens", None) or 0
    return max(chunk, prefill, USUAL_TOKENS) * max(1, getattr(arguments, "dp_size", None) or 1)
