"""LMDeploy's TurboMind: its grouped products of int4 and MXFP4, called as its engine's MoE layer calls them.

The steps are those of TurboMind's `MoeFfnLayer`: its gate (from logits: softmax of the chosen), the product of gate
and up with SiLU in it, the product of w2, the weighted sum. Only the parts of the package that this needs are imported:
all of it wants a dozen packages more. TurboMind 0.18 is linked against CUDA 12; `bench.bundle` brings what a machine
with another CUDA lacks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from support import packing
from support.cases import Routed
from torch import Tensor

from bench.peers.contenders.base import Contender, round_up, widened
from bench.peers.problem import Codes, Problem

#: Tokens that the gate handles as one, and its tiles of tokens for an expert (`kMoeGateVecSize`, `kMoeGateMaxTiles`).
GATE_VECTOR, GATE_TILES = 4, 16
#: A logit whose softmax is nothing beside those of chosen experts.
NOT_CHOSEN = -30.0


@dataclass
class Weights:
    """What was prepared of w13 and w2; `source` for preparing it again in other memory."""

    source: Problem
    handles: list[Any]
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Inputs:
    """A call's inputs, its buffers, and the kernels that tuning chose for both products."""

    x: Tensor
    gate: dict[str, Any]
    routes: dict[str, Tensor]
    buffers: list[Tensor]
    plans: list[Any] = field(default_factory=list)


class TurboMind(Contender):
    """`Linear.forward_moe` twice, between the engine's gate and its sum."""

    def __init__(self) -> None:
        from importlib.metadata import version

        self.lmdeploy = load()
        self.versions = {"lmdeploy": version("lmdeploy")}
        self.linear = self.lmdeploy.linear.Linear()

    def prepare(self, problem: Problem) -> Weights:
        shape = problem.shape
        source = self.format_of(problem)
        plans = [
            self.linear.get_weight_plan(weight_format=source, dtype=torch.bfloat16, grouped=True, fusion_type=fusion)
            for fusion in ("silu", None)
        ]
        hidden, intermediate = rounded((shape.hidden, shape.intermediate), [plan.shape_constraints for plan in plans])
        w13, w2 = problem.padded(hidden, intermediate)
        gate, up = (tensors(part) for part in (w13.rows(0, intermediate), w13.rows(intermediate, 2 * intermediate)))
        first = self.linear.fuse_weight(
            (gate["weight"], up["weight"]), plan=plans[0], scales=(gate["scales"], up["scales"])
        )
        handles = [first, self.linear.prepare_weight(plan=plans[1], **tensors(w2))]
        if not all(handle.is_graph_compatible for handle in handles):
            raise RuntimeError("TurboMind says that its kernels for this layer cannot be captured in CUDA graphs")
        return Weights(problem, handles, hidden, intermediate)

    def format_of(self, problem: Problem) -> Any:
        """The package's record of how the weights are stored."""
        formats = self.lmdeploy.weight_format
        if problem.format.element == "e2m1":
            return formats.MXFP4Format()
        return formats.CompressedTensorFormat(block_in=problem.format.group_size)

    def duplicate(self, weights: Weights) -> Weights:
        return self.prepare(weights.source)

    def inputs(self, weights: Weights, routed: Routed) -> Inputs:
        tokens, top_k = routed.ids.shape
        experts = weights.source.shape.experts
        x = widened(routed.x, weights.hidden)
        logits = torch.full((tokens, experts), NOT_CHOSEN, device=x.device)
        gate = {
            "logits": logits.scatter(1, routed.ids.long(), routed.weights.log()),
            "token_mask": torch.ones(tokens, dtype=torch.bool, device=x.device),
        }
        buffers = [
            torch.empty(tokens * top_k, weights.intermediate, dtype=x.dtype, device=x.device),
            torch.empty(tokens * top_k, weights.hidden, dtype=x.dtype, device=x.device),
            torch.empty_like(x),
        ]
        inputs = Inputs(x, gate, routes(tokens, top_k, experts, x.device), buffers)
        # A graph is captured on a stream of its own, whose workspace has to be there by then.
        with torch.cuda.stream(capturing()):
            self._gate(inputs)
            for handle, given in zip(weights.handles, products(inputs), strict=True):
                inputs.plans.append(self.linear.tune(weight=handle, **given)[0])
        torch.cuda.synchronize()
        return inputs

    def run(self, weights: Weights, inputs: Inputs) -> Tensor:
        self._gate(inputs)
        for handle, plan, given in zip(weights.handles, inputs.plans, products(inputs), strict=True):
            self.linear.forward_moe(weight=handle, exec_plan=plan, **given)
        here = {name: self.lmdeploy.tm.from_dlpack(inputs.routes[name]) for name in ("scales", "en2f")}
        output, rows = (self.lmdeploy.tm.from_dlpack(inputs.buffers[index]) for index in (2, 1))
        with self.linear._activate():
            self.lmdeploy.tm.invokeMoeCombine(
                out=output, src=rows, experts_per_token=inputs.routes["en2f"].shape[0], **here
            )
        return inputs.buffers[2]

    def _gate(self, inputs: Inputs) -> None:
        """Which pairs are whose, and the weights of choices, into the call's buffers."""
        tm = self.lmdeploy.tm
        tm.moe_gate_v2(
            **{name: tm.from_dlpack(tensor) for name, tensor in (inputs.gate | inputs.routes).items()},
            experts_per_token=inputs.routes["en2f"].shape[0],
            norm_topk=True,
            stream_ptr=torch.cuda.current_stream().cuda_stream,
        )


def load() -> SimpleNamespace:
    """The extension (`tm`) and the modules `linear` and `weight_format`. Raises ImportError where they do not load."""
    found = find_spec("lmdeploy")
    if found is None or not found.submodule_search_locations:
        raise ImportError("no module named lmdeploy")
    folder = found.submodule_search_locations[0]
    if "lmdeploy.turbomind" not in sys.modules:
        for name, place in (("lmdeploy", folder), ("lmdeploy.turbomind", f"{folder}/turbomind")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [place]
    tm = import_module("lmdeploy.turbomind._turbomind")
    sys.modules["lmdeploy.turbomind"]._tm = tm  # type: ignore[attr-defined]
    names = ("linear", "weight_format")
    return SimpleNamespace(tm=tm, **{name: import_module(f"lmdeploy.turbomind.{name}") for name in names})


def rounded(sizes: tuple[int, int], constraints: list[Any]) -> tuple[int, int]:
    """Hidden and intermediate size as both products want them; a constraint is the least and the multiple of (k, n)."""
    (least_13, multiple_13), (least_2, multiple_2) = constraints
    hidden = max(sizes[0], least_13[0], least_2[1]), math.lcm(multiple_13[0], multiple_2[1])
    intermediate = max(sizes[1], least_13[1], least_2[0]), math.lcm(multiple_13[1], multiple_2[0])
    return round_up(*hidden), round_up(*intermediate)


def tensors(part: Codes) -> dict[str, list[Tensor]]:
    """The tensors of each expert as checkpoints have them: compressed-tensors' int4, or blocks and scales of MXFP4."""
    packed = packing.nibbles(part.codes).contiguous()
    words = packed.unflatten(-1, (-1, 16)) if part.scales.dtype == torch.uint8 else packed.view(torch.int32)
    return {"weight": list(words), "scales": list(part.scales)}


def routes(tokens: int, top_k: int, experts: int, device: torch.device) -> dict[str, Tensor]:
    """Buffers of the gate: for each pair in the order of experts its token (f2n), and the way back (en2f)."""
    padded, pairs = round_up(tokens, GATE_VECTOR), tokens * top_k
    sizes = {
        "f2n": ((pairs,), torch.int32),
        "f2E": ((pairs,), torch.int32),
        "en2f": ((top_k, tokens), torch.int32),
        "offsets": ((experts + 1,), torch.int32),
        "scales": ((top_k, tokens), torch.float32),
        "masks": ((experts, padded), torch.int8),
        "accum": ((experts * GATE_TILES,), torch.int32),
    }
    return {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in sizes.items()}


def products(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Arguments of the two products: rows of x picked by token, then the activations as they lie."""
    offsets = inputs.routes["offsets"]
    middle, rows, _ = inputs.buffers
    return (
        {"x": inputs.x, "out": middle, "offsets": offsets, "indices": inputs.routes["f2n"]},
        {"x": middle, "out": rows, "offsets": offsets},
    )


def capturing() -> torch.cuda.Stream:
    """The stream on which `torch.cuda.graph` captures."""
    kind = torch.cuda.graph
    if kind.default_capture_stream is None:
        kind.default_capture_stream = torch.cuda.Stream()
    return kind.default_capture_stream
