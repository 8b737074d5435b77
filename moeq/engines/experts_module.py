"""Run packed experts inside the module that transformers has for a layer's experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.load.activation import activation_arguments
from moeq.load.kernel_experts import kernel_experts
from moeq.matrix import split_projections
from moeq.model.converted import written_padding
from moeq.reference.moe import ACTIVATIONS, Activation, Expert, Linear, activate, moe
from moeq.schemes.dequantize import dequantize

if TYPE_CHECKING:
    from moeq_kernels import PreparedLayer

#: Least `max_tokens` with which a layer is prepared.
MIN_TOKENS = 4096

#: Names of the parameters that hold experts in modules of transformers.
STACKS = {"gate_up_proj", "up_proj", "down_proj"}
STACKS |= {f"{name}_bias" for name in STACKS}


class ConvertedExperts:
    """Experts of one layer, which replace a module's weights and compute its forward pass.

    Args:
        module: transformers' module for the experts. Its weights are replaced by parameters with the names and shapes
            of the checkpoint's stacked tensors, and this object becomes its attribute `converted`.
        entry: the layer in the manifest, written for one rank.

    Raises MoeqError `answer.no-kernel` if the module computes more than its products and their activation.
    """

    #: `kernels` (`moeq_kernels`), `reference` (float32, dequantising one expert at a time), or `auto`: kernels on a
    #: GPU, the reference on a CPU.
    run_on: Literal["auto", "kernels", "reference"] = "auto"

    def __init__(self, module: Any, entry: LayerEntry) -> None:
        self.module = module
        self.entry = entry
        self.activation = find_activation(module, entry)
        self._prepared: tuple[Any, int, PreparedLayer] | None = None
        others = {name for name, _ in module.named_parameters()} - STACKS
        if others or getattr(module, "has_post_expert_norm", False):
            raise MoeqError(
                "answer.no-kernel",
                f"{type(module).__name__} has more than its experts' weights: {', '.join(sorted(others)) or 'a norm'}",
                "moeq.load_experts gives the packed experts of a layer to code that computes the rest",
            )
        for name in STACKS & module._parameters.keys():
            delattr(module, name)
        layout = get_layout(entry.layout)
        for role in STACKED_ROLES:
            for part, spec in layout.tensors(entry.matrices[role].padded_spec).items():
                empty = torch.empty(entry.num_experts, *spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
                module.register_parameter(f"{role}_{part}", nn.Parameter(empty, requires_grad=False))
        module.converted = self
        module._is_hf_initialized = True  # the model's own code would fill the deleted weights

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run experts `ids` `[tokens, top_k]` on `[tokens, H]`, and return their weighted sums `[tokens, H]`."""
        kernels = self.run_on == "kernels" or (self.run_on == "auto" and x.is_cuda)
        return (self._fused if kernels else self._reference)(x, weights, ids)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the prepared layer: a copy prepares its own."""
        return {**self.__dict__, "_prepared": None}

    def _fused(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tokens, hidden = x.shape
        key = (x.device, x.dtype, hidden, ids.shape[1])
        prepared_key, address, layer = self._prepared or (None, 0, None)
        if layer is None or prepared_key != key or layer.max_tokens < tokens or self._moved(address):
            layer = self._prepare(x, ids.shape[1])
            # A prepared layer holds references to its weights, and offloaded weights leave the device after a call.
            is_offloaded = getattr(getattr(self.module, "_hf_hook", None), "offload", False)
            self._prepared = None if is_offloaded else (key, self.module.w13_weight.data_ptr(), layer)
        return layer(x, weights, ids)

    def _moved(self, address: int) -> bool:
        """Return whether the weights are at another address now.

        A compiled program cannot compare addresses; the layer that it calls keeps the weights it was prepared with.
        """
        return not torch.compiler.is_compiling() and bool(self.module.w13_weight.data_ptr() != address)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, x: Tensor, top_k: int) -> PreparedLayer:
        """Prepare the layer for calls of up to twice as many tokens, and at least of MIN_TOKENS."""
        from moeq_kernels import prepare

        specs = {role: self.entry.matrices[role].padded_spec for role in STACKED_ROLES}
        return prepare(
            kernel_experts(self.entry.layout, specs, {role: self._parts(role) for role in STACKED_ROLES}),
            top_k=top_k,
            max_tokens=max(MIN_TOKENS, 2 * x.shape[0]),
            dtype=x.dtype,
            hidden_size=x.shape[1],
            **activation_arguments(self.activation),
        )

    def _reference(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if x.device.type != "cpu":
            raise MoeqError(
                "environment.no-kernel",
                f"experts on {x.device} run neither in moeq's kernels (CUDA, ROCm) nor as its reference (CPU)",
            )
        self._prepared = None  # the model has left the GPU, and so may its weights
        return moe(x, self.expert, weights, ids, self.activation).to(x.dtype)

    def expert(self, number: int) -> Expert:
        """Dequantise one expert."""
        linears = {}
        for role in STACKED_ROLES:
            matrices, layout = self.entry.matrices, get_layout(self.entry.layout)
            parts = {part: tensor[number] for part, tensor in self._parts(role).items()}
            padded = layout.unpack(parts, matrices[role].padded_spec)
            matrix = written_padding(layout, matrices).unpad(padded)
            for name, projection in split_projections(matrix):
                linears[name] = Linear(dequantize(projection), projection.bias)
        return Expert(linears.get("gate"), linears["up"], linears["down"])

    def _parts(self, role: StackedRole) -> dict[str, Tensor]:
        return {part: getattr(self.module, f"{role}_{part}").data for part in self.entry.matrices[role].tensors}


def find_activation(module: Any, entry: LayerEntry) -> Activation:
    """Find the activation between a module's products by trying it on numbers.

    Raises MoeqError `answer.no-kernel` if the kernels do not know it.
    """
    random = torch.Generator().manual_seed(0)
    first, up = (8 * torch.randn(16, 32, generator=random, device="cpu") for _ in range(2))
    gate = first if entry.matrices["w13"].spec.gated else None
    if gate is None:
        results = [module.act_fn(up)]
    else:
        halves, interleaved = torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2)
        results = [module._apply_gate(halves), module._apply_gate(interleaved)]
    for candidate in _candidates(module):
        wanted = activate(gate, up, candidate)
        if any(torch.allclose(result, wanted, rtol=1e-5, atol=1e-5) for result in results):
            return candidate
    raise MoeqError(
        "answer.no-kernel",
        f"{type(module).__name__} has an activation that moeq's kernels do not compute",
        f"they compute {', '.join(ACTIVATIONS)} and gpt-oss's clamped SwiGLU",
    )


def _candidates(module: Any) -> Iterator[Activation]:
    for name in ACTIVATIONS:
        yield Activation(name)
    alphas = [getattr(module, "alpha", None), getattr(module.config, "swiglu_alpha", None), Activation.alpha]
    limits = [getattr(module, "limit", None), getattr(module.config, "swiglu_limit", None), None]
    for alpha in alphas:
        for limit in limits:
            if alpha is not None:
                yield Activation("swigluoai", float(alpha), limit if limit is None else float(limit))
