"""Prepared layers: checks, plans, compiled kernels and descriptors are made once, and a call only launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor

from moeq_kernels import portable
from moeq_kernels.compiling import Warmed
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.gpu import GPUS, Gpu, gpu_of
from moeq_kernels.hopper import support
from moeq_kernels.hopper.cost import rounded
from moeq_kernels.launch import Schedule, run_with_triton
from moeq_kernels.mma import mma_launches as mma
from moeq_kernels.operators import Forward, register
from moeq_kernels.problem import Problem, describe, symbolic, tensors_of
from moeq_kernels.programs import Program, program_of
from moeq_kernels.records import PackedExperts
from moeq_kernels.routing import Choosing
from moeq_kernels.schedules import FAMILIES, piece_tokens, schedule, workspace_bytes
from moeq_kernels.validate import (
    as_int32,
    check_experts,
    check_ids,
    check_map,
    check_routing,
    epilogue_of,
    require,
    require_runnable,
    shape_of,
)
from moeq_kernels.warming import warmup


class PreparedLayer:
    """MoE layer that is ready to be called; `prepare` builds it.

    Attributes:
        family: kernel family, a key of `schedules.FAMILIES`.
        reason: reason why the Hopper kernels do not run the layer; None if they do.
        max_tokens: upper bound of the tokens in a call.
    """

    def __init__(
        self,
        family: str,
        problem: Problem,
        tensors: dict[str, Tensor],
        device: torch.device,
        max_tokens: int,
        reason: str | None,
        plan: Any = None,
    ) -> None:
        self.family, self.problem, self.device = family, problem, device
        self.max_tokens, self.reason = max_tokens, reason
        self._expected = (problem.dtype, problem.hidden, problem.top_k, device)
        self._tensors = tensors
        self._plan = plan
        self.is_direct = device.type == "cuda" and torch.version.hip is None
        self._maps: list[int] = []  # addresses of the weights' descriptors
        self._kept: list[Any] = []  # the descriptors, which have to stay alive
        if self.is_direct:
            self._program = program_of(family, problem, device.index, plan, None)
            self.weight_addresses = [tensors[name].data_ptr() for name in self._program.weights]
        self._handle = register(self)

    def __str__(self) -> str:
        problem, first = self.problem, self.problem.w13
        features = f"hidden {problem.hidden}, intermediate {problem.intermediate}"
        group = "one scale a channel" if first.channelwise else f"groups of {first.group_size}"
        dtype = str(problem.dtype).removeprefix("torch.")
        layer = f"{problem.experts} experts, top {problem.top_k}, {features}, {first.layout} {first.element}, {group}"
        if first.activation_dtype:
            native = portable.fp8_products(problem.gpu, problem.interpret) == "native"
            dtype += " as e4m3" + ("" if native else " (multiplied in bfloat16)")
        where = "Triton's interpreter" if problem.interpret else problem.gpu.name
        text = f"{layer}, {dtype}, {where}: {self.family} kernels"
        return text if self.reason is None else f"{text}, because {self.reason}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies be prepared anew, because addresses and the operator's number belong to this layer."""
        given = (self.family, self.problem, self._tensors, self.device, self.max_tokens, self.reason, self._plan)
        return PreparedLayer, given

    def workspace_bytes(self, tokens: int | None = None) -> int:
        """Return the workspace bytes that are enough for every call of up to `tokens` (default: max_tokens) tokens."""
        limit = self.max_tokens
        return workspace_bytes(self.family, self.problem, limit if tokens is None else tokens, limit)

    def warm(self, max_tokens: int | None = None) -> Warmed:
        """Compile and load all kernels for 1 to max_tokens tokens. Raises KernelEnvironmentError if one fails."""
        return warmup([self], max_tokens)

    def program(self, choosing: Choosing) -> Program:
        """Return the program whose first kernel chooses the experts."""
        return program_of(self.family, self.problem, self._program.device, self._plan, choosing)

    def schedule(self, tokens: int) -> Schedule:
        """Return the launches of a call of `tokens` tokens."""
        return schedule(self.family, self.problem, tokens, self._plan)

    def explain(self, tokens: int) -> str:
        """Describe the layer, and in one line each the kernels that a call of `tokens` tokens launches."""
        planned = self.schedule(tokens)
        lines = [str(self)]
        for launch in planned.launches:
            name = launch.kernel.rpartition(":")[2]
            sizes = " ".join(f"{key}={value}" for key, value in launch.constants.items() if type(value) is int)
            lines.append(f"  {name} x {launch.programs} {sizes}")
        ranked_plans = getattr(FAMILIES[self.family], "ranked_plans", None)
        if ranked_plans and self._plan is None:
            ranked = ranked_plans(self.problem, rounded(min(tokens, piece_tokens(self.family, self.problem))))
            pairs = zip(("predicted", "runner-up"), ranked, strict=False)
            lines += [f"  {label} {time:.1f} us: {plan}" for label, (time, plan) in pairs]
        return "\n".join(lines)

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Compute y `[M, H]` from x `[M, H]` and topk_weights, topk_ids `[M, top_k]`, as `fused_moe` does.

        Args:
            x: tokens in the dtype and on the device of `prepare`.
            topk_weights: float32; other floating dtypes are converted.
            topk_ids: int32; int64 is converted.
            out: contiguous tensor like x for y, whose memory does not overlap x; None for a new tensor.
            workspace: uint8, at least `workspace_bytes(M)` bytes on the same device, which no other stream uses before
                this call has ended; None for torch's allocator.
            expert_map: int32 `[num_experts]` if `prepare` was given num_experts: local expert of each, or -1.

        A call never synchronises with the device. Raises KernelArgumentError if tensors do not fit the layer. There
        are no gradients: a backward pass that reaches y raises KernelUnsupportedError (in compiled programs y is a
        constant).
        """
        if torch.compiler.is_compiling():
            return self._as_operator(x, topk_weights, topk_ids, out, workspace, expert_map)
        if (x.requires_grad or topk_weights.requires_grad) and torch.is_grad_enabled():
            result: Tensor = Forward.apply(x, topk_weights, topk_ids, out, workspace, expert_map, self)
            return result
        if type(x) is FakeTensor or _len_torch_dispatch_stack():  # fake tensors or a recording dispatch mode
            return self._as_operator(x, topk_weights, topk_ids, out, workspace, expert_map)
        # Every line from here on costs host time in each call, so messages are built only when they are needed.
        dtype, hidden, top_k, device = self._expected
        tokens = x.shape[0] if x.shape else 0
        if not (
            x.dtype == dtype
            and topk_weights.dtype == torch.float32
            and topk_ids.dtype == torch.int32
            and x.shape == (tokens, hidden)
            and topk_ids.shape == topk_weights.shape == (tokens, top_k)
            and x.is_contiguous()
            and topk_weights.is_contiguous()
            and topk_ids.is_contiguous()
            and x.device == topk_ids.device == topk_weights.device == device
            and tokens <= self.max_tokens
        ):
            x, topk_weights, topk_ids = self._accept(x, topk_weights, topk_ids)
        if (expert_map is None) == self.problem.mapped:
            self.refuse_map(expert_map)
        y = self.checked_out(x, out)
        if tokens:
            self._run(x, topk_weights, topk_ids, y, workspace, expert_map)
        return y

    def checked_out(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the tensor for y, or a new one like x. Raises KernelArgumentError if it does not fit."""
        if out is None:
            return torch.empty_like(x)
        if not (
            out.shape == x.shape
            and out.dtype == x.dtype
            and out.device == x.device
            and out.is_contiguous()
            and abs(out.data_ptr() - x.data_ptr()) >= x.nbytes
        ):
            apart = out.device != x.device or abs(out.data_ptr() - x.data_ptr()) >= x.nbytes
            shared = "out is in the memory of x; kernels still read x while they write out"
            require(apart or out.shape != x.shape, shared)
            raise KernelArgumentError(
                f"out is {shape_of(out)} on {out.device}; it must be contiguous and like x, {shape_of(x)} on {x.device}"
            )
        return out

    def _as_operator(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor | None, workspace: Tensor | None,
        expert_map: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        torch.ops.moeq_kernels.layer(y, x, topk_weights, topk_ids, expert_map, workspace, self._handle)
        return y

    def _run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, y: Tensor, workspace: Tensor | None,
        expert_map: Tensor | None,
    ) -> None:  # fmt: skip
        if self.device.type == "meta":  # meta tensors have shapes only
            return
        if not self.is_direct:
            check_ids(topk_ids, self.problem.known)
            given = {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids, "out": y}
            self.run_with_triton(self.schedule(x.shape[0]), given, workspace, expert_map)
            return
        program, tokens = self._program, x.shape[0]
        bound = program.bounds.get(tokens) or program.bind(tokens)
        workspace = self.checked_workspace(x, workspace, bound.workspace_bytes)
        if expert_map is not None:
            expert_map = self.checked_map(expert_map)  # the name keeps a converted copy alive until the launch
        addresses = [
            x.data_ptr(), topk_weights.data_ptr(), topk_ids.data_ptr(), y.data_ptr(), workspace.data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(), *self.weight_addresses,
        ]  # fmt: skip
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16:
            self._run_aligned(x, topk_weights, topk_ids, y, workspace, expert_map)
            return
        self.launch(program, bound, addresses)

    def launch(self, program: Program, bound: Any, addresses: list[int]) -> None:
        """Launch a call of the layer's program, or of one that shares its descriptors, on the current stream."""
        if len(self._maps) < len(program.maps):
            self._describe()
        index = program.device
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                bound.run(addresses, self._maps, torch._C._cuda_getCurrentRawStream(index))
            return
        bound.run(addresses, self._maps, torch._C._cuda_getCurrentRawStream(index))

    def _describe(self) -> None:
        """Encode descriptors of the weights for new boxes."""
        from moeq_kernels.cuda import TensorMap, enter, promotion_of

        device = self._program.device
        # The lock is needed because threads may call layers of one program concurrently.
        with self._program.lock, torch.cuda.device(device):
            enter(device)
            for area, swizzle, block in list(self._program.maps)[len(self._maps) :]:
                descriptor = TensorMap(area, swizzle, block, promotion_of(self.problem.gpu))
                descriptor.at(self._tensors[area.root].data_ptr() + area.offset)
                self._kept.append(descriptor)
                self._maps.append(descriptor.address)

    def _run_aligned(self, *given: Any) -> None:
        """Run on copies, because an address is no multiple of 16 bytes."""
        x, topk_weights, topk_ids, y, workspace, expert_map = given
        aligned = torch.empty_like(y)
        self._run(x.clone(), topk_weights.clone(), topk_ids.clone(), aligned, workspace, expert_map)
        y.copy_(aligned)

    def run_with_triton(
        self, planned: Schedule, given: dict[str, Tensor], workspace: Tensor | None, expert_map: Tensor | None
    ) -> None:
        """Run a schedule through Triton's launcher; `given` are the tensors of a call by root, among them x."""
        workspace = self.checked_workspace(given["x"], workspace, planned.workspace_bytes)
        roots = {**given, "workspace": workspace, **self._tensors}
        if expert_map is not None:
            roots["expert_map"] = self.checked_map(expert_map)
        run_with_triton(planned.launches, roots)

    def _accept(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert the tensors to what the kernels take. Raises KernelArgumentError if they do not fit."""
        problem = self.problem
        check_routing(x, topk_weights, topk_ids)
        check_ids(topk_ids, problem.known)
        self.check_tokens(x)
        require(
            topk_ids.shape[1] == problem.top_k,
            f"topk_ids is {shape_of(topk_ids)}; the layer was prepared for top_k = {problem.top_k}",
        )
        ids = as_int32(topk_ids, problem.known)
        return x.contiguous(), topk_weights.to(torch.float32).contiguous(), ids.contiguous()

    def check_tokens(self, x: Tensor) -> None:
        """Raise KernelArgumentError unless x `[M, H]` has the dtype, features and device of the layer."""
        problem = self.problem
        wanted = f"{str(problem.dtype).removeprefix('torch.')} [tokens, {problem.hidden}]"
        require(
            x.dtype == problem.dtype and x.dim() == 2 and x.shape[1] == problem.hidden,
            f"x is {shape_of(x)}; the layer was prepared for {wanted}",
        )
        require(x.device == self.device, f"x is on {x.device}; the layer was prepared on {self.device}")
        require(
            x.shape[0] <= self.max_tokens,
            f"x has {x.shape[0]} tokens; the layer was prepared for at most {self.max_tokens}",
            "prepare it with a larger max_tokens",
        )

    def refuse_map(self, expert_map: Tensor | None) -> None:
        """Raise KernelArgumentError because the layer needs a map and has none, or the other way round."""
        if self.problem.mapped:
            raise KernelArgumentError(f"expert_map is missing; the layer was prepared for {self.problem.known} experts")
        assert expert_map is not None
        raise KernelArgumentError(
            f"expert_map is {shape_of(expert_map)}, but the layer was prepared without num_experts",
            f"prepare it with num_experts={expert_map.numel()}",
        )

    def checked_map(self, expert_map: Tensor) -> Tensor:
        """Return the map as contiguous int32. Raises KernelArgumentError if it does not fit."""
        check_map(expert_map, self.device, self.problem.known, self.problem.experts)
        return as_int32(expert_map, self.problem.experts).contiguous()

    def checked_workspace(self, x: Tensor, workspace: Tensor | None, needed: int) -> Tensor:
        """Return the workspace of a call, or a new one. Raises KernelArgumentError if it does not fit."""
        if workspace is None:
            return torch.empty(needed, dtype=torch.uint8, device=self.device)
        if (
            workspace.nbytes < needed
            or workspace.data_ptr() % 16
            or workspace.dtype != torch.uint8
            or workspace.device != x.device
            or not workspace.is_contiguous()
        ):
            require(workspace.device == x.device, f"workspace is on {workspace.device}, but x is on {x.device}")
            raise KernelArgumentError(
                f"workspace is {shape_of(workspace)} at {workspace.data_ptr():#x}, strides {list(workspace.stride())}; "
                f"it has to be uint8 [{needed}], contiguous, at a multiple of 16",
                "workspace_bytes(tokens) is enough for all calls of up to `tokens` tokens",
            )
        return workspace


def prepare(
    experts: PackedExperts,
    *,
    top_k: int,
    max_tokens: int,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    hidden_size: int | None = None,
    num_experts: int | None = None,
    router_weight_on_input: bool = False,
    activation_dtype: str | None = None,
    portable: bool = False,
    gpu: str | None = None,
    warm: bool = False,
) -> PreparedLayer:
    """Prepare a layer that is called many times: all work that depends on the weights only is done once, here.

    Args:
        experts: both projections, on the device of the calls; on `meta` (with `gpu`) for planning and compiling only.
        top_k: experts per token.
        max_tokens: upper bound of the tokens in a call.
        activation: name of the activation, as in `fused_moe`.
        alpha: number in the formula, as in `fused_moe`.
        beta: number in the formula, as in `fused_moe`.
        limit: clamp, or number in the formula, as in `fused_moe`.
        router_weight_on_input: whether router weights multiply the input, as in `fused_moe`.
        dtype: dtype of x and y, bfloat16 or float16.
        hidden_size: features of x; by default those of the packed w13, padding included.
        num_experts: number of experts that topk_ids may name if calls bring an expert_map (expert parallelism).
        activation_dtype: `fp8` quantises rows of x to e4m3, "" does not, None follows
            `PackedMatrix.activation_dtype`. Only Hopper GPUs multiply MXFP4 (in Marlin's order or moeq's) and symmetric
            int4 in Marlin's order with e4m3, from 16 to 96 tokens an expert on (fewer run in 16 bits). The layer then
            keeps shifts of its own for MXFP4 (a byte for 32 weights). e4m3 activations make an error of about 4 %,
            16-bit ones of 0.3 %.
        portable: whether the portable kernels run even where others could.
        gpu: name in `moeq_kernels.gpu.GPUS` for experts on `meta`.
        warm: whether to compile (in parallel) and load all kernels for 1 to max_tokens tokens now.

    A tensor whose address is no multiple of 16 bytes is copied once. Raises the errors of `fused_moe`, and
    KernelUnsupportedError if 4-bit weights cannot be multiplied with e4m3 activations: on another GPU, with zero
    points, or if MXFP4's scales of a feature are more than 2^14 apart.
    """
    require(top_k >= 1, f"top_k is {top_k}; it must be at least 1")
    whole = isinstance(max_tokens, int) and max_tokens >= 0
    require(whole, f"max_tokens is {max_tokens}; it must be a whole number and not negative")
    require(isinstance(dtype, torch.dtype), f"dtype is {dtype!r}; it must be torch.bfloat16 or torch.float16")
    hidden = experts.w13.k if hidden_size is None else hidden_size
    require(hidden >= 1, f"hidden_size is {hidden}; it must be at least 1")
    require(num_experts is None or num_experts >= 1, f"num_experts is {num_experts}; it must be at least 1")
    experts = experts.quantising(activation_dtype)
    x = torch.empty(0, hidden, dtype=dtype, device=experts.w13.weight.device)
    epilogue = epilogue_of(experts, activation, alpha, beta, limit, router_weight_on_input)
    layer = prepare_for(x, experts, top_k, max_tokens, epilogue, num_experts, portable=portable, gpu=gpu, folds=True)
    if warm:
        layer.warm()
    return layer


def prepare_for(
    x: Tensor,
    experts: PackedExperts,
    top_k: int,
    max_tokens: int,
    epilogue: Epilogue,
    num_experts: int | None,
    *,
    portable: bool = False,
    gpu: str | None = None,
    family: str | None = None,
    plan: Any = None,
    dependent: bool = True,
    folds: bool = False,
) -> PreparedLayer:
    """Prepare a layer for calls with tokens like x, with options that `prepare` does not offer.

    `family` and `plan` override the choice of kernels, `dependent` allows kernels to start before the preceding one has
    ended, and `folds` says that the layer will be kept, so that folding its scales pays.
    """
    w4a8 = folds and family is None and not portable and support.asks_w4a8(experts)
    if w4a8:
        family, experts = "hopper-w4a8", experts.quantising("")
    check_experts(x, experts, epilogue.activation)
    device = x.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    routing = {} if num_experts is None else {"known": num_experts, "mapped": True}
    problem = describe(x, experts, epilogue, top_k, gpu=_gpu(device, gpu), **routing)
    if w4a8:
        support.require_w4a8(problem)
    ready = getattr(FAMILIES.get(family or ""), "ready", None)
    if ready is not None:
        experts = ready(experts)
        problem = replace(problem, w13=symbolic("w13", experts.w13), w2=symbolic("w2", experts.w2))
    tensors = tensors_of(experts)
    if device.type != "meta":
        require_runnable(device)
        tensors = {name: one if one.data_ptr() % 16 == 0 else one.clone() for name, one in tensors.items()}
    reason = "portable kernels were asked for" if portable else None
    if family is None:
        reason = reason or support.unsupported_reason(problem)
        mma_reason = next(mma.reasons(problem), None)
        if mma_reason and reason and not portable and mma.is_preferred(problem):
            reason = mma_reason  # a reason that lies in the GPU would not help, as it cannot be changed
        fallback = "portable" if mma_reason else "mma-w4a16"
        family = fallback if reason else support.family(problem)
    is_dependent = dependent and not problem.interpret and problem.gpu.capability >= (9, 0)
    problem = replace(problem, dependent=is_dependent)
    return PreparedLayer(family, problem, tensors, device, max_tokens, reason, plan)


def _gpu(device: torch.device, name: str | None) -> Gpu:
    if name is None:
        require(device.type != "meta", "experts are on meta and no gpu is named", f"known: {', '.join(GPUS)}")
        return gpu_of(device)
    require(device.type == "meta", f"gpu is '{name}', but experts are on {device}; gpu is for experts on meta")
    require(name in GPUS, f"unknown gpu '{name}'", f"known: {', '.join(GPUS)}")
    return GPUS[name]


def explain(experts: PackedExperts, tokens: int, **options: Any) -> str:
    """Describe the kernels for a number of tokens, and why others do not run; `prepare` takes the same options."""
    return prepare(experts, max_tokens=tokens, **options).explain(tokens)
