"""Run moeq's kernels as an expert class of vLLM.

The engine builds its own kernel object around the class, and thus does everything between router and experts: exchange
of tokens with other ranks, shared experts and their stream, buffers that its profiling run measures. Kernels read
adapters (LoRA) from vLLM's own stacked tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import current_workspace_manager

from moeq.engines.vllm.router import padding_of
from moeq.errors import MoeqError
from moeq.load.kernel_experts import prepared_layer
from moeq.load.torch_loader import check_groups, check_kernel
from moeq.load.warmup import make_ready
from moeq_kernels import LoraExperts, LoraMatrix, fused_moe_lora
from moeq_kernels.activations import BY_ENGINE_NAME
from moeq_kernels.fused import batched_ids, batched_layer
from moeq_kernels.lora import MAX_RANK
from moeq_kernels.routed import RoutedLayer

if TYPE_CHECKING:
    from moeq.checkpoint.manifest import LayerEntry
    from moeq.load.ranks import RankPart
    from moeq_kernels import LoraExperts, PackedExperts, PreparedLayer, Router


logger = init_logger("vllm.moeq")  # below the engine's own logger, whose handlers print it

#: Names of the engine's activations in the kernels.
ACTIVATIONS = {member: BY_ENGINE_NAME[member.value] for member in MoEActivation if member.value in BY_ENGINE_NAME}


class MoeqExperts(LoRAExpertsMixin, FusedMoEExpertsModular):  # type: ignore[misc]
    """Experts of one layer in moeq's kernels."""

    def __init__(self, moe_config: Any, prepared: PreparedLayer, packed: PackedExperts, **batches: int) -> None:
        # No scheme, since the kernels quantise activations themselves if the format needs that.
        super().__init__(moe_config, FUSED_MOE_UNQUANTIZED_CONFIG, **batches)
        self.prepared, self.packed = prepared, packed
        self._adapters: LoraExperts | None = None
        #: By dtype of the logits: the layer that chooses experts, and its workspace bytes.
        self._routed: dict[torch.dtype, tuple[RoutedLayer, int]] = {}
        # The largest size for all calls, since the engine's buffer never grows after its profiling run.
        self.workspace_bytes = prepared.workspace_bytes()

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether the experts take unquantised inputs: always."""
        return True

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Return the format of tokens by rows, not of batches by expert."""
        return FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        from moeq_kernels import interpreter

        return current_platform.is_cuda_alike() or interpreter.active()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True  # `check_own` asks the kernels by layout

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        """Return whether tokens are exchanged by all-gather and reduce-scatter; others were never run with moeq."""
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    def set_lora_context(self, ctx: Any) -> None:
        """Take the engine's stacks of adapters."""
        super().set_lora_context(ctx)
        self._adapters = adapters_of(ctx, self.prepared.problem.epilogue.gated, self.moe_config.activation)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """Return a no-op: the kernels weight and sum a token's choices."""
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Return experts, tokens, intermediate size, hidden size, choices of a token."""
        problem = self.prepared.problem
        return problem.experts, a1.shape[0], problem.intermediate, a1.shape[1], topk_ids.shape[1]

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, *more: Any, **named: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return shapes of two buffers and the output; the first is empty, as it shares memory with the output."""
        return (0,), (-(-self.workspace_bytes // self.moe_config.in_dtype.itemsize),), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Run the layer on `hidden_states` `[M, H]`, with weighted sums in `output` `[M, H]`."""
        if apply_router_weight_on_input:  # the engine has multiplied the input
            topk_weights = torch.ones_like(topk_weights)
        adapters = self._adapters
        chosen = None if adapters is None else adapters_of_tokens(self._lora_context, hidden_states.shape[0])
        if adapters is not None and chosen is not None:
            routing = topk_weights, topk_ids, chosen
            given = {**activation_arguments(self.moe_config), "expert_map": expert_map}
            output.copy_(fused_moe_lora(hidden_states, self.packed, adapters, *routing, **given))
            return
        workspace = workspace2.view(torch.uint8)
        self.prepared(hidden_states, topk_weights, topk_ids, out=output, workspace=workspace, expert_map=expert_map)

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        weight_on_input: bool,
    ) -> torch.Tensor:
        """Run the layer where no tokens are exchanged with other ranks, and return weighted sums `[M, H]`.

        The engine's kernel object would copy the result once more (0.26.0).
        """
        if weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        workspace = _workspace(self.workspace_bytes)
        return self.prepared(x, topk_weights, topk_ids, workspace=workspace, expert_map=expert_map)

    def run_routed(self, x: torch.Tensor, logits: torch.Tensor, router: Router, layer: Any) -> torch.Tensor:
        """Run the layer where no tokens are exchanged with other ranks, with experts chosen from logits `[M, E]`."""
        bias = layer.e_score_correction_bias
        if logits.dtype not in self._routed:
            new = RoutedLayer(self.prepared, router, logits.dtype, None if bias is None else bias.dtype)
            new.warm_choosing()
            self._routed[logits.dtype] = new, new.workspace_bytes()
        routed, workspace_bytes = self._routed[logits.dtype]
        return routed(
            x,
            logits,
            correction_bias=bias,
            padding=padding_of(len(x)),
            workspace=_workspace(workspace_bytes),
            expert_map=layer.expert_map,
        )


class MoeqBatchedExperts(MoeqExperts):
    """Experts of one layer whose tokens come in batches by expert, as from DeepEP's low-latency kernels.

    Each row is a token with one choice, so the engine weights and sums the results.

    Args:
        prepared: the layer in the kernels, for rows of `moeq_kernels.fused.batched_ids`.
        batches: `max_num_tokens` of a rank and `num_dispatchers`, whose product is the rows of a batch.
    """

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Return the format of batches by expert."""
        return FusedMoEActivationFormat.BatchedExperts

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether the exchange must be told to leave inputs unquantised: no, a batched one refuses that.

        It quantises nothing here, because these experts have no scheme.
        """
        return False

    @staticmethod
    def supports_lora() -> bool:
        """Return False: the engine has no adapters beside such batches."""
        return False

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return bool(moe_parallel_config.use_batched_activation_format)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceDelegate:
        """Leave weights and sums to the exchange of tokens."""
        return TopKWeightAndReduceDelegate()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Return experts, rows of a batch, intermediate size, hidden size, choices of a token."""
        return a1.shape[0], a1.shape[1], self.prepared.problem.intermediate, a1.shape[2], topk_ids.shape[1]

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, *more: Any, **named: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return shapes of two empty buffers and the output; the layer, whose plan is fixed, has its own buffers."""
        return (0,), (0,), (self.prepared.problem.experts, M, K)

    def apply(  # type: ignore[override]
        self, output: torch.Tensor, hidden_states: torch.Tensor, *given: Any, expert_tokens_meta: Any, **named: Any
    ) -> None:
        """Run the layer on `hidden_states` `[E, rows, H]`, with results in `output`; unused rows become zero."""
        ids = batched_ids(expert_tokens_meta.expert_num_tokens, hidden_states.shape[1])
        rows = hidden_states.reshape(len(ids), -1)
        output.copy_(self.prepared(rows, torch.ones_like(ids, dtype=torch.float32), ids).view(output.shape))


def _workspace(size: int) -> torch.Tensor | None:
    """Return the engine's buffer, which all layers share; None on a CPU, where the engine keeps none."""
    if current_platform.is_cpu():
        return None
    buffer: torch.Tensor = current_workspace_manager().get_simultaneous(((size,), torch.uint8))[0]
    return buffer


def experts_class(moe: Any) -> type[MoeqExperts]:
    """Return the class for the format in which tokens reach the experts of a layer."""
    return MoeqBatchedExperts if moe.moe_parallel_config.use_batched_activation_format else MoeqExperts


def runs_alone(kernel: modular_kernel.FusedMoEKernel) -> bool:
    """Return whether no tokens are exchanged with other ranks."""
    return isinstance(kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular)


def clamp_arguments(moe: Any) -> dict[str, float | None]:
    """Return the constants of a layer's SwiGLU as arguments of the engine's records of scales."""
    return {"gemm1_alpha": moe.swiglu_alpha, "gemm1_beta": moe.swiglu_beta, "gemm1_clamp_limit": moe.swiglu_limit}


def activation_arguments(moe: Any) -> dict[str, Any]:
    """Return the kernels' arguments for a layer's activation and its constants."""
    name = ACTIVATIONS[moe.activation]
    if moe.activation is MoEActivation.SWIGLUOAI:  # the engine's kernel has gpt-oss's constants, whatever the config
        return {"activation": name, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
    if moe.activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        alpha = 1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha
        return {"activation": name, "alpha": alpha, "beta": moe.swiglu_beta or 0.0, "limit": moe.swiglu_limit}
    if name == "swiglu_step":  # the engine's kernel has this limit, whatever the config
        return {"activation": name, "limit": 7.0}
    if name == "situ":
        bound = moe.activation_situ_linear_beta
        return {"activation": name, "alpha": moe.activation_situ_beta, "limit": bound if bound and bound > 0 else None}
    # SwiGLU is the only other activation that the engine clamps.
    return {"activation": name, "limit": moe.swiglu_limit if moe.activation is MoEActivation.SILU else None}


def check_own(moe: Any, entry: LayerEntry, part: RankPart) -> None:
    """Raise MoeqError `answer.no-kernel` or `usage.dtype` if moeq's kernels cannot run a layer."""
    check_kernel(entry, moe.in_dtype, "")
    check_adapters(moe)
    check_groups(entry, part)
    offload = get_current_vllm_config().offload_config
    if offload.prefetch.offload_group_size > 0 or offload.offload_backend == "prefetch":
        raise MoeqError(
            "answer.no-kernel",
            "moeq's kernels keep the addresses of experts, so with --offload-group-size all would stay on the GPU",
            "start without --offload-group-size, or with --cpu-offload-gb, whose memory GPUs read in place",
        )
    kind = experts_class(moe)
    supported, reason = kind.is_supported_config(kind, moe, None, None, kind.activation_format())
    if not supported:
        raise MoeqError("answer.no-kernel", f"layer {entry.layer}: moeq's {reason}")


def slow_reason(moe: Any, packed: PackedExperts) -> str | None:
    """Return why experts (device `meta`) would run in the kernels for any GPU; None if this GPU has its own."""
    from moeq_kernels.gpu import GPUS, gpu_of

    device = torch.device(moe.device)
    if device.type != "cuda":
        return f"experts are on {device.type}"
    if moe.is_lora_enabled:
        return "adapters (LoRA) run in no others"
    if experts_class(moe) is MoeqBatchedExperts:
        return "kernels for this GPU were not measured with batches by expert"
    here = gpu_of(device)
    kind = (here.backend, here.capability)
    known_name = next((gpu.name for gpu in GPUS.values() if (gpu.backend, gpu.capability) == kind), None)
    if known_name is None:
        return f"{here.name} is not a GPU that moeq has kernels for"
    return _prepare(moe, packed, None, known_name).reason


def own_kernel(moe: Any, packed: PackedExperts, layer: Any, *, wait: bool) -> modular_kernel.FusedMoEKernel:
    """Make the engine's kernel object around moeq's experts, and compile and load their kernels (`make_ready`)."""
    prepare = maybe_make_prepare_finalize(
        moe=moe,
        quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    if experts_class(moe) is MoeqBatchedExperts:
        batches = {"max_num_tokens": prepare.max_num_tokens_per_rank(), "num_dispatchers": prepare.num_dispatchers()}
        prepared = _prepare_batches(moe, packed, **batches)  # the engine's profiling run compiles its one plan
        return modular_kernel.FusedMoEKernel(prepare, MoeqBatchedExperts(moe, prepared, packed, **batches))
    prepared = _prepare(moe, packed, _experts_of_all_ranks(layer))
    make_ready(prepared, logger, wait=wait)
    return modular_kernel.FusedMoEKernel(prepare, MoeqExperts(moe, prepared, packed))


def compile_early(moe: Any, packed: PackedExperts, layer: Any) -> None:
    """Begin to compile the kernels before the experts are filled: compiling needs no values."""
    if experts_class(moe) is not MoeqBatchedExperts:
        make_ready(_prepare(moe, packed, _experts_of_all_ranks(layer)), logger, wait=False)


def _experts_of_all_ranks(layer: Any) -> int | None:
    """Return the model's number of experts if each rank holds a part of them; None if each rank holds all."""
    return None if layer.expert_map is None else layer.global_num_experts


def _prepare_batches(moe: Any, packed: PackedExperts, max_num_tokens: int, num_dispatchers: int) -> PreparedLayer:
    """Prepare the layer for batches that all ranks fill with `max_num_tokens` tokens at most."""
    from moeq_kernels.validate import epilogue_of

    given = {"alpha": None, "beta": None, "limit": None, **activation_arguments(moe)}
    rows, pairs = max_num_tokens * num_dispatchers, max_num_tokens * num_dispatchers * moe.experts_per_token
    x = torch.empty(0, moe.hidden_dim, dtype=moe.in_dtype, device=packed.w13.weight.device)
    epilogue = epilogue_of(packed, weight_first=False, **given)
    return batched_layer(x, packed, epilogue, -(-pairs // moe.num_experts), rows=packed.num_experts * rows)


def _prepare(moe: Any, packed: PackedExperts, num_experts: int | None, gpu: str | None = None) -> PreparedLayer:
    parallel = moe.moe_parallel_config
    return prepared_layer(
        packed,
        top_k=moe.experts_per_token,
        # All-gather collects the tokens of all ranks.
        max_tokens=moe.max_num_tokens * parallel.dp_size * parallel.pcp_size,
        dtype=moe.in_dtype,
        hidden_size=moe.hidden_dim,
        num_experts=num_experts,
        gpu=gpu,
        **activation_arguments(moe),
    )


def check_adapters(moe: Any) -> None:
    """Raise MoeqError `answer.no-kernel` if the engine was started for adapters that moeq's kernels do not take."""
    lora = get_current_vllm_config().lora_config
    if lora is None:
        return
    if lora.max_lora_rank > MAX_RANK:
        raise MoeqError(
            "answer.no-kernel",
            f"moeq's kernels take adapters of rank {MAX_RANK} at most, and --max-lora-rank is {lora.max_lora_rank}",
            f"start with --max-lora-rank {MAX_RANK}",
        )
    if lora.fully_sharded_loras:
        raise MoeqError(
            "answer.no-kernel",
            "moeq's kernels take adapters whose ranks are whole, and --fully-sharded-loras splits them",
            "start without --fully-sharded-loras",
        )
    if lora.lora_dtype not in ("auto", None, moe.in_dtype):
        raise MoeqError(
            "answer.no-kernel",
            f"adapters are {lora.lora_dtype}, and moeq's kernels take them in the model's {moe.in_dtype}",
            "start with --lora-dtype auto",
        )


def adapters_of(context: Any, gated: bool, activation: MoEActivation) -> LoraExperts:
    """Describe the engine's stacks of adapters (`MoELoRAContext`), which it fills and empties in place."""
    first = [LoraMatrix(*one) for one in zip(context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True)]
    down = LoraMatrix(context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0])
    if not gated:
        return LoraExperts(up=first[0], down=down)
    if context.w13_num_slices == 2:
        return LoraExperts(gate=first[0], up=first[1], down=down)
    return LoraExperts(gate_up=first[0], down=down, interleaved=activation is MoEActivation.SWIGLUOAI)


def adapters_of_tokens(context: Any, tokens: int) -> torch.Tensor | None:
    """Return the adapter of each token, int32 or int64 `[tokens]`, -1 for none; None if no token has one.

    The engine decides on the host, before the step, so a captured graph has either adapters or none.
    """
    wrapper = context.punica_wrapper
    meta = getattr(wrapper, "token_mapping_meta", None)
    if meta is not None and bool(meta.no_lora_flag_cpu.item()):
        return None  # the mapping is left from an earlier step
    mapping: torch.Tensor | None = context.local_token_lora_mapping  # where tokens came from other ranks
    if mapping is None:
        mapping = wrapper.token_lora_indices if meta is None else meta.token_lora_mapping
    return mapping[:tokens]
