"""Table of what `fused_moe` covers. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.activations import GATED, UNGATED
from moeq_kernels.formats import FORMATS


@dataclass(frozen=True)
class Capability:
    """Weight layout that the kernels read."""

    layout: str  #: layout id
    elements: tuple[str, ...]  #: element types of the codes
    #: Numbers of codes that share a scale; -1 is one scale per output feature. Empty for unquantised weights.
    group_sizes: tuple[int, ...]
    zero_points: bool  #: whether stored zero points are read
    act_order: bool  #: whether columns are permuted (act-order)
    dtypes: tuple[str, ...]  #: torch dtype names of the activations
    int8_activations: bool  #: whether activations are quantised to int8 per token
    #: Whether `PackedMatrix.activation_dtype` may ask for e4m3 activations, quantised per token, or per token and group
    #: of the weights.
    fp8_activations: bool
    #: Granularity of stored output features (per half for gate and up) and input features.
    n_multiple: int
    k_multiple: int
    biases: bool = True  #: whether expert biases are added
    activations: tuple[str, ...] = GATED  #: gated activations, each in both gate-up and interleaved row order
    ungated_activations: tuple[str, ...] = UNGATED  #: activations without a gate
    #: `standard` (`[tokens, hidden]`) and `batched` (`[experts, max_tokens, hidden]`).
    activation_formats: tuple[str, ...] = ("standard", "batched")
    expert_parallel: bool = True  #: whether experts may live on other ranks (expert map)
    router_weight_on_input: bool = True  #: whether router weights may multiply the input
    minimum_cuda: tuple[int, int] = (8, 0)  #: lowest NVIDIA compute capability
    #: AMD architectures for which the kernels are compiled, but were not run.
    rocm: tuple[str, ...] = ("gfx942", "gfx950")
    interpreter: bool = True  #: whether the kernels run without a GPU


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
