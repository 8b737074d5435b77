"""Prepared layers whose calls bring router logits: the first kernel of a call chooses the experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor

from moeq_kernels.areas import ALIGNMENT
from moeq_kernels.compiling import Warmed, compile_all, specialise
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.prepared import PreparedLayer
from moeq_kernels.routing import MANY_TOKENS, Choosing, Router, check_bias, check_router, chosen_bytes, route
from moeq_kernels.validate import require, shape_of


class RoutedLayer:
    """MoE layer from x and router logits to y: `route` and a prepared layer in one chain of kernels.

    Args:
        layer: the prepared layer. Logits have a column for each expert that its topk_ids may name.
        router: the rule; its top_k is that of the layer.
        logits_dtype: dtype of the logits; others are converted.
        bias_dtype: dtype of the correction bias; None if the rule has none.

    Raises KernelArgumentError if rule and layer do not fit together.
    """

    def __init__(
        self,
        layer: PreparedLayer,
        router: Router,
        logits_dtype: torch.dtype = torch.float32,
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        check_router(router, layer.problem.known)
        require(
            router.top_k == layer.problem.top_k,
            f"the router chooses {router.top_k} experts; the layer was prepared for top_k = {layer.problem.top_k}",
        )
        self.layer = layer
        self.choosing = Choosing(router, logits_dtype, bias_dtype)
        self._masked = replace(self.choosing, padding=True)

    def __str__(self) -> str:
        return f"{self.layer}, experts chosen from logits"

    def workspace_bytes(self, tokens: int | None = None) -> int:
        """Return the workspace bytes that are enough for every call of up to `tokens` (default: max_tokens) tokens."""
        most = self.layer.max_tokens if tokens is None else tokens
        needed = self.layer.workspace_bytes(most)
        return -(-needed // ALIGNMENT) * ALIGNMENT + 2 * chosen_bytes(most, self.choosing.router.top_k)

    def warm(self, max_tokens: int | None = None) -> Warmed:
        """Compile and load all kernels for 1 to max_tokens tokens. Raises KernelEnvironmentError if one fails."""
        return self.layer.warm(max_tokens) + self.warm_choosing()

    def warm_choosing(self) -> Warmed:
        """Compile and load the kernel that chooses experts, without those of the layer."""
        problem, device = self.layer.problem, self.layer.device
        if problem.interpret or problem.gpu.backend != "cuda":
            return Warmed(0, 0, 0.0)
        counts = (1, MANY_TOKENS)
        wanted = {specialise(one.launch(problem, count)) for one in (self.choosing, self._masked) for count in counts}
        done = compile_all(wanted, problem.gpu)
        if device.type == "cuda":
            from moeq_kernels.cuda import load

            with torch.cuda.device(device):
                for one in wanted:
                    load(one, problem.gpu, device.index)
        return done

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        *,
        correction_bias: Tensor | None = None,
        padding: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Compute y `[M, H]` from x `[M, H]` and logits `[M, E]`, as the layer does with the results of `route`.

        Args:
            x: tokens, as in a call of the layer.
            logits: floating point, one column for each expert that topk_ids of the layer may name.
            correction_bias: `[E]`, added to the scores for choosing, but not for weighting.
            padding: bool `[M]`: rows that are no tokens, whose y is zero; None if all are.
            out: tensor for y, as in a call of the layer.
            workspace: memory, as in a call of the layer, but of this object's `workspace_bytes`.
            expert_map: local expert of each expert, as in a call of the layer.

        Raises the errors of the layer.
        """
        layer, tokens = self.layer, x.shape[0] if x.dim() else 0
        self._check(x, logits, correction_bias, padding)
        recorded = torch.compiler.is_compiling() or type(x) is FakeTensor or _len_torch_dispatch_stack()
        trained = torch.is_grad_enabled() and (x.requires_grad or logits.requires_grad)
        if (
            recorded
            or trained
            or layer.device.type == "meta"
            or not tokens
            or x.data_ptr() % 16
            or (out is not None and out.data_ptr() % 16)
        ):
            return self._with_torch(x, logits, correction_bias, padding, out, workspace, expert_map)
        if (expert_map is None) == layer.problem.mapped:
            layer.refuse_map(expert_map)
        x = x.contiguous()
        y = layer.checked_out(x, out)
        choosing = self.choosing if padding is None else self._masked
        given = [_aligned(logits.to(choosing.logits))]
        given += [] if correction_bias is None else [_aligned(correction_bias.to(choosing.bias))]
        given += [] if padding is None else [_aligned(padding.view(torch.uint8))]
        if layer.is_direct:
            self._run(choosing, x, given, y, workspace, expert_map)
        else:
            self._run_with_triton(choosing, x, given, y, workspace, expert_map)
        return y

    def _check(self, x: Tensor, logits: Tensor, correction_bias: Tensor | None, padding: Tensor | None) -> None:
        """Raise KernelArgumentError if the tensors do not fit; messages are built only then, as they cost host time."""
        layer, problem, bias = self.layer, self.layer.problem, self.choosing.bias
        tokens, device = x.shape[0] if x.dim() else 0, x.device
        like = x.dtype == problem.dtype and x.shape == (tokens, problem.hidden) and device == layer.device
        if not like or tokens > layer.max_tokens:
            layer.check_tokens(x)
        if logits.shape != (tokens, problem.known) or not logits.is_floating_point() or logits.device != device:
            raise KernelArgumentError(
                f"logits are {shape_of(logits)} on {logits.device}; with x {shape_of(x)} on {device} they must be "
                f"floating [{tokens}, {problem.known}] there"
            )
        if (correction_bias is None) != (bias is None):
            raise KernelArgumentError(
                "correction_bias is missing; the layer was prepared with bias_dtype"
                if correction_bias is None
                else "correction_bias is given; the layer was prepared without bias_dtype"
            )
        if correction_bias is not None and (
            correction_bias.shape != (problem.known,)
            or correction_bias.dtype != bias
            or correction_bias.device != device
        ):
            check_bias(correction_bias, problem.known)
            place = f"correction_bias is on {correction_bias.device}, but x is on {device}"
            require(correction_bias.device == device, place)
        if padding is not None and not (
            padding.shape == (tokens,) and padding.dtype == torch.bool and padding.device == device
        ):
            raise KernelArgumentError(f"padding must be bool [{tokens}] on {device}, as x is {shape_of(x)}")

    def _with_torch(
        self, x: Tensor, logits: Tensor, correction_bias: Tensor | None, padding: Tensor | None, out: Tensor | None,
        workspace: Tensor | None, expert_map: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Choose by torch's operators, and call the layer."""
        weights, ids = route(logits, self.choosing.router, correction_bias)
        if padding is not None:
            weights, ids = weights.masked_fill(padding[:, None], 0.0), ids.masked_fill(padding[:, None], -1)
        return self.layer(x, weights, ids, out=out, workspace=workspace, expert_map=expert_map)

    def _run(
        self, choosing: Choosing, x: Tensor, given: list[Tensor], y: Tensor, workspace: Tensor | None,
        expert_map: Tensor | None,
    ) -> None:  # fmt: skip
        layer, tokens = self.layer, x.shape[0]
        program = layer.program(choosing)
        bound = program.bounds.get(tokens) or program.bind(tokens)
        workspace = layer.checked_workspace(x, workspace, bound.workspace_bytes)
        if expert_map is not None:
            expert_map = layer.checked_map(expert_map)  # the name keeps a converted copy alive until the launch
        map_address = 0 if expert_map is None else expert_map.data_ptr()
        place, size = workspace.data_ptr(), chosen_bytes(tokens, choosing.router.top_k)
        chosen = place + bound.workspace_bytes - 2 * size
        addresses = [
            x.data_ptr(), chosen, chosen + size, y.data_ptr(), place, map_address,
            *(one.data_ptr() for one in given), *layer.weight_addresses,
        ]  # fmt: skip
        layer.launch(program, bound, addresses)

    def _run_with_triton(
        self, choosing: Choosing, x: Tensor, given: list[Tensor], y: Tensor, workspace: Tensor | None,
        expert_map: Tensor | None,
    ) -> None:  # fmt: skip
        layer, shape = self.layer, (x.shape[0], choosing.router.top_k)
        planned = choosing.before(layer.schedule(x.shape[0]), layer.problem, x.shape[0])
        tensors = {
            "x": x,
            "out": y,
            "topk_weights": torch.empty(shape, dtype=torch.float32, device=x.device),
            "topk_ids": torch.empty(shape, dtype=torch.int32, device=x.device),
            **dict(zip(choosing.roots, given, strict=True)),
        }
        layer.run_with_triton(planned, tensors, workspace, expert_map)


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it that is contiguous and begins at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
