"""Table of what `fused_moe` covers. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.activations import GATED, UNGATED
from moeq_kernels.formats import FORMATS


@dataclass(frozen=True)
class Capability:
    """Weight layout that the kernels read.

    Attributes:
        layout: layout id.
        elements: element types of the codes.
        group_sizes: numbers of codes that share a scale; -1 is one scale per output feature. Empty for unquantised
            weights.
        zero_points: whether stored zero points are read.
        act_order: whether columns are permuted (act-order).
        dtypes: torch dtype names of the activations.
        int8_activations: whether activations are quantised to int8 per token.
        fp8_activations: whether `PackedMatrix.activation_dtype` may ask for e4m3 activations, quantised per token, or
            per token and group of the weights.
        n_multiple, k_multiple: granularity of stored output features (per half for gate and up) and input features.
        biases: whether expert biases are added.
        activations: gated activations, each in both gate-up and interleaved row order.
        ungated_activations: activations without a gate.
        activation_formats: `standard` (`[tokens, hidden]`) and `batched` (`[experts, max_tokens, hidden]`).
        expert_parallel: whether experts may live on other ranks (expert map).
        router_weight_on_input: whether router weights may multiply the input.
        minimum_cuda: lowest NVIDIA compute capability.
        rocm: AMD architectures for which the kernels are compiled, but were not run.
        interpreter: whether the kernels run without a GPU.
    """

    layout: str
    elements: tuple[str, ...]
    group_sizes: tuple[int, ...]
    zero_points: bool
    act_order: bool
    dtypes: tuple[str, ...]
    int8_activations: bool
    fp8_activations: bool
    n_multiple: int
    k_multiple: int
    biases: bool = True
    activations: tuple[str, ...] = GATED
    ungated_activations: tuple[str, ...] = UNGATED
    activation_formats: tuple[str, ...] = ("standard", "batched")
    expert_parallel: bool = True
    router_weight_on_input: bool = True
    minimum_cuda: tuple[int, int] = (8, 0)
    rocm: tuple[str, ...] = ("gfx942", "gfx950")
    interpreter: bool = True


def _capability(layout: str) -> Capability:
    entries = [entry for entry in FORMATS.values() if entry.layout == layout]
    first = entries[0]
    return Capability(
        layout=layout,
        elements=tuple(entry.element for entry in entries),
        group_sizes=first.group_sizes,
        zero_points=first.zero_points,
        act_order=first.act_order,
        dtypes=tuple(dict.fromkeys(dtype for entry in entries for dtype in entry.dtypes)),
        int8_activations=first.int8_activations,
        fp8_activations=first.fp8_activations,
        n_multiple=max(entry.n_multiple for entry in entries),
        k_multiple=max(entry.k_multiple for entry in entries),
    )


#: Records of all layouts in the order of the format table.
CAPABILITIES: tuple[Capability, ...] = tuple(_capability(layout) for layout in dict.fromkeys(key[0] for key in FORMATS))
