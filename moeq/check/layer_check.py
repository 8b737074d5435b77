"""Check one layer: each product on its own, which shows where an error is, and the fused layer as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.check.activation_loss import ActivationLoss, require_prepared
from moeq.check.comparison import ProductComparison
from moeq.check.diagnose import Evidence, diagnose
from moeq.check.inputs import Inputs, make_inputs
from moeq.check.kernel_calls import activations_of, down_products, first_products, fused_layer, kernel_errors
from moeq.check.results import LayerReport, ProjectionResult, Sample, Timing
from moeq.check.timing import time_runs
from moeq.check.whole_layer import LayerComparison, Passage, pass_16bit, pass_fp8, pass_int8
from moeq.checkpoint.manifest import LayerEntry, Projection, stacked_role
from moeq.errors import MoeqError
from moeq.load.packed_sample import PackedPart, load_packed
from moeq.model import Checkpoint
from moeq.reference.arithmetic import (
    Emulated,
    emulate_16bit,
    emulate_fp8,
    emulate_int8,
    quantize_rows,
    quantize_rows_e4m3,
)
from moeq.reference.moe import Activation, Expert, Linear, activate
from moeq.reference.stored_floats import stored_weight

#: Largest number of other weights that a failing product is compared with, to recognise a swap.
MAX_SUSPECTS = 16


@dataclass(frozen=True)
class LayerCheck:
    """Check of one layer: both sides of the comparison, and its options."""

    converted: Checkpoint  #: packed weights for the kernels
    reference: Checkpoint  #: dequantised weights for the reference
    entry: LayerEntry  #: the layer in the manifest
    sample: Sample  #: experts and runs
    device: torch.device  #: device of the kernels and of the reference
    dtype: torch.dtype  #: activation dtype
    seed: int  #: seed of the random tokens
    activation: Activation  #: the model's activation
    fused: bool = True  #: run the fused layer too, not only each product
    #: `fp8` to bound the loss of e4m3 activations, and to multiply with them where kernels can.
    activation_dtype: str = ""

    @property
    def widths(self) -> dict[Projection, int]:
        """Output features of each projection, without padding."""
        w13, w2 = self.entry.matrices["w13"].spec, self.entry.matrices["w2"].spec
        first: dict[Projection, int] = {"gate": w13.n // 2, "up": w13.n // 2} if w13.gated else {"up": w13.n}
        return {**first, "down": w2.n}

    def k_of(self, name: Projection) -> int:
        """Return the input features of a projection."""
        return self.entry.matrices[stacked_role(name)].spec.k

    def activations(self, name: Projection) -> str:
        """Return what the kernels quantise the activations of a product to: `int8`, `fp8` or an empty text."""
        matrix = self.entry.matrices[stacked_role(name)]
        return activations_of(self.entry.layout, matrix.spec.element, self.activation_dtype)

    def group_of(self, name: Projection) -> int:
        """Return the number of input features that share a scale, of weights and of e4m3 activations."""
        return self.entry.matrices[stacked_role(name)].spec.group_size

    def e4m3_groups(self) -> tuple[int, int]:
        """Return how many input features of w13, and of w2, share an e4m3 scale: all of them, or a group."""
        first, second = (
            self.group_of(name) if self.activations(name) == "fp8" else self.k_of(name) for name in ("up", "down")
        )
        return first, second

    def linear(self, expert: int, name: Projection) -> Linear:
        """Dequantise one projection of one expert, on the device."""
        layer = self.entry.layer
        bias = self.reference.matrix(layer, expert, name).bias
        weight = self._stored(expert, name)
        if weight is None:
            weight = self.reference.dequantize(layer, expert, name)
        return Linear(weight.to(self.device), None if bias is None else bias.to(self.device))

    def _stored(self, expert: int, name: Projection) -> Tensor | None:
        """Decode the source's tensors by the reference's own definitions; None for formats that it lacks."""
        layer = self.entry.layer
        if self.reference.kind != "source" or name not in self.reference.kind_of(layer, expert).projections:
            return None
        return stored_weight(self.reference.parts(layer, expert, name))

    def expert(self, expert: int) -> Expert:
        """Dequantise all projections of one expert."""
        gate = self.linear(expert, "gate") if "gate" in self.widths else None
        return Expert(gate, self.linear(expert, "up"), self.linear(expert, "down"))

    def emulate(self, name: Projection, x: Tensor, linear: Linear, kind: str | None = None) -> tuple[Emulated, ...]:
        """Compute a product in every way in which a correct kernel may do it.

        Args:
            kind: `int8`, `fp8` or an empty text, to which activations are quantised; None: the kernels' own kind.
        """
        kind = self.activations(name) if kind is None else kind
        if kind == "fp8":
            return emulate_fp8(x, linear, self.group_of(name), tensor_cores=self.device.type == "cuda")
        return emulate_int8(x, linear) if kind == "int8" else emulate_16bit(x, linear, self.dtype)

    def combine(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Apply the model's activation to gate and up."""
        return activate(gate, up, self.activation)


@dataclass(frozen=True)
class Products:
    """Results of the kernels for every pair of a token and one of its experts."""

    actual: Mapping[Projection, Tensor]  #: float32 `[pairs, N]` by projection
    #: `[pairs, I]` in the activation dtype: the input of down, made from the kernels' own gate and up, so that the
    #: kernel and the reference of down start from the same numbers.
    hidden: Tensor


def check_layer(check: LayerCheck, advance: Callable[[str], None]) -> LayerReport:
    """Run kernels and reference and compare them; `advance` is called once per run and once per expert."""
    layer, sample = check.entry.layer, check.sample
    inputs = make_inputs(check.reference, sample, check.k_of("up"), check.dtype, check.seed).to(check.device)
    packed = load_packed(check.converted, check.entry, sample.experts, check.device)
    if check.activation_dtype == "fp8" and check.activations("down") != "fp8":
        require_prepared(packed)
    elif check.activation_dtype == "fp8":
        if len(packed) > 1 and check.group_of("down") == check.k_of("down"):
            raise MoeqError(
                "answer.no-kernel",
                "every rank quantises its own share of a row to e4m3 with its own scale, which the reference does not",
                "check a conversion for one rank",
            )
        packed = [replace(part, experts=part.experts.quantising("fp8")) for part in packed]
    with kernel_errors():
        output, unequal, repeated = _run_fused(check, packed, inputs, advance) if check.fused else (None, (), 0)
        products = _run_products(check, packed, inputs)
    timings = _timings(check, packed, inputs)
    del packed

    whole = LayerComparison(inputs, check.widths["down"], check.dtype)
    loss = ActivationLoss(inputs, check.widths["down"], check.dtype, check.e4m3_groups())
    comparisons = {name: ProductComparison(name, check.k_of(name)) for name in check.widths}
    for index, expert_id in enumerate(sample.experts):
        tokens, slots = torch.where(inputs.ids == index)
        if len(tokens):
            expert = check.expert(expert_id)
            first = _compare_expert(check, comparisons, products, expert, (inputs, tokens, slots), expert_id)
            if output is not None:
                whole.add(passage(check, check.activations("down"), inputs.x[tokens], expert, first), tokens, slots)
            if check.activation_dtype == "fp8":
                loss.add(expert_id, expert, check.combine, tokens, slots)
        advance(f"layer {layer} expert {expert_id}")
    found = [_explained(check, comparison, products, inputs) for comparison in comparisons.values()]
    if output is not None:
        found.append(whole.result(layer, output, sample.experts, check.k_of("up")))
    if check.activation_dtype == "fp8":
        found.append(loss.result(layer, check.k_of("up")))
    done = replace(sample, runs=tuple(run for run, _ in inputs.runs))
    return LayerReport(done, tuple(found), repeated, unequal, timings)


def _timings(check: LayerCheck, packed: Sequence[PackedPart], inputs: Inputs) -> tuple[Timing, ...]:
    """Time the runs of the fused layer on a GPU; elsewhere, and where it does not run, there is nothing to time."""
    if check.device.type != "cuda" or not check.fused:
        return ()
    return time_runs(packed, inputs, check.activation, check.entry.layer)


def passage(check: LayerCheck, kind: str, x: Tensor, expert: Expert, first: dict[str, tuple[Emulated, ...]]) -> Passage:
    """Compute one expert's outputs through the whole layer, with activations that are quantised to `kind`."""
    if kind == "fp8":
        group, cores = check.group_of("down"), check.device.type == "cuda"
        return pass_fp8(x, expert, first, check.combine, check.dtype, group=group, tensor_cores=cores)
    through = pass_int8 if kind == "int8" else pass_16bit
    return through(x, expert, first, check.combine, check.dtype)


def _run_fused(
    check: LayerCheck, packed: Sequence[PackedPart], inputs: Inputs, advance: Callable[[str], None]
) -> tuple[Tensor, tuple[str, ...], int]:
    """Run the fused layer; return its output, the runs that did not repeat bit for bit, and the count of repeats."""
    outputs, unequal, repeated = [], [], 0
    again = inputs.runs if check.device.type == "cuda" else inputs.runs[:1]  # the sequential interpreter repeats one
    for run, part in inputs.runs:
        arguments = (packed, inputs.x[part], inputs.weights[part], inputs.ids[part], check.activation)
        y = fused_layer(*arguments)
        if any(run is one for one, _ in again):
            repeated += 1
            if not torch.equal(y.view(torch.uint8), fused_layer(*arguments).view(torch.uint8)):
                unequal.append(run.title)
        outputs.append(y[:, : check.widths["down"]])
        advance(f"layer {check.entry.layer}, {run.title}")
    return torch.cat(outputs), tuple(unequal), repeated


def _run_products(check: LayerCheck, packed: Sequence[PackedPart], inputs: Inputs) -> Products:
    """Compute every product: run by run on a GPU, all at once in the interpreter, whose cost is per launch."""
    parts = [part for _, part in inputs.runs] if check.device.type == "cuda" else [slice(0, len(inputs.x))]
    first = [first_products(packed, inputs.x[part], inputs.ids[part], check.widths["up"]) for part in parts]
    actual: dict[Projection, Tensor] = {
        name: torch.cat([one[name] for one in first]) for name in check.widths if name != "down"
    }
    hidden = check.combine(actual.get("gate"), actual["up"]).to(check.dtype).nan_to_num(0.0, 0.0, 0.0)
    top_k = inputs.ids.shape[1]
    pairs = [slice(part.start * top_k, part.stop * top_k) for part in parts]
    down = [
        down_products(packed, hidden[pair], inputs.ids[part], check.widths["down"])
        for part, pair in zip(parts, pairs, strict=True)
    ]
    return Products({**actual, "down": torch.cat(down)}, hidden)


def _compare_expert(
    check: LayerCheck,
    comparisons: Mapping[Projection, ProductComparison],
    products: Products,
    expert: Expert,
    place: tuple[Inputs, Tensor, Tensor],
    expert_id: int,
) -> dict[str, tuple[Emulated, ...]]:
    """Compare every product of one expert and return the emulations of gate and up."""
    inputs, tokens, slots = place
    pairs = tokens * inputs.ids.shape[1] + slots
    x = inputs.x[tokens].float()
    first: dict[str, tuple[Emulated, ...]] = {}
    projections: dict[Projection, Linear | None] = {"gate": expert.gate, "up": expert.up, "down": expert.down}
    for name, linear in projections.items():
        if linear is None:
            continue
        rows = products.hidden[pairs].float() if name == "down" else x
        emulated = check.emulate(name, rows, linear)
        comparisons[name].add(expert_id, products.actual[name][pairs], emulated, pairs)
        if name != "down":
            first[name] = emulated
    return first


def _explained(
    check: LayerCheck, comparison: ProductComparison, products: Products, inputs: Inputs
) -> ProjectionResult:
    """Return the result of a product, with a diagnosis of every failing expert."""
    result = comparison.result(check.entry.layer)
    experts = tuple(
        one if one.passed else replace(one, looks_like=_reason(check, comparison, one.expert, products, inputs))
        for one in result.experts
    )
    return replace(result, experts=experts)


def _reason(
    check: LayerCheck, comparison: ProductComparison, expert: int, products: Products, inputs: Inputs
) -> str | None:
    """Return what a failing expert's product looks like, or None if nothing fits."""
    name: Projection = comparison.name  # type: ignore[assignment]
    pairs = torch.where(inputs.ids.flatten() == check.sample.experts.index(expert))[0]
    rows = products.hidden[pairs] if name == "down" else inputs.x[pairs // inputs.ids.shape[1]]
    linear = check.linear(expert, name)
    emulated = check.emulate(name, rows.float(), linear)[comparison.arithmetic]
    x = emulated_input(rows.float(), check.activations(name), check.group_of(name))
    groups = _groups(check, expert, name)
    evidence = Evidence(x, linear.weight, groups, products.actual[name][pairs], emulated)
    return diagnose(evidence, _suspects(check, expert, name, rows.float()))


def emulated_input(x: Tensor, kind: str, group: int) -> Tensor:
    """Return the rows as the product sees them: unchanged, or quantised to int8 or e4m3 and back."""
    if not kind:
        return x
    codes, scale = quantize_rows(x) if kind == "int8" else quantize_rows_e4m3(x, group)
    return codes * (scale if kind == "int8" else scale.repeat_interleave(group, dim=1)[:, : x.shape[1]])


def _groups(check: LayerCheck, expert: int, name: Projection) -> Tensor:
    """Return the group of each input feature of a projection."""
    matrix = check.reference.matrix(check.entry.layer, expert, name)
    if matrix.group_index is not None:
        return matrix.group_index.to(check.device)
    return torch.arange(matrix.spec.k, device=check.device) // matrix.spec.group_size


def _suspects(
    check: LayerCheck, expert: int, name: Projection, rows: Tensor
) -> Iterator[tuple[str, tuple[Emulated, ...]]]:
    """Yield (name, products) of the same rows with other weights of the sample, each computed lazily."""
    siblings: list[Projection] = [one for one in check.widths if one != "down"] if name != "down" else ["down"]
    experts = (expert, *(one for one in check.sample.experts if one != expert))
    places = [place for place in itertools.product(experts, siblings) if place != (expert, name)]
    for other, projection in places[:MAX_SUSPECTS]:
        yield f"expert {other} {projection}", check.emulate(projection, rows, check.linear(other, projection))
