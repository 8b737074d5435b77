"""Whether two answers of an engine are the same, and what the model in float32 says: for `transcode_generate.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generating import FACTOR, GAP, Generated, error_of, gap_of

import moeq
from moeq.model.quantized_modules import quantized_modules, read_module
from moeq.schemes.dequantize import dequantize

if TYPE_CHECKING:
    from torch import Tensor, nn

#: How much further log-probabilities have to move without experts than by what is compared.
MATTERS = 10.0


def reference(folder: Path, floats: Path) -> nn.Module:
    """Load the model in float32 in transformers, with the source's dequantised numbers.

    Args:
        folder: the source.
        floats: the same transcoded to bfloat16, for its config and the names.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    source = moeq.open(folder)
    modules = [module for _, module in model.named_modules() if getattr(module, "gate_up_proj", None) is not None]
    stacks = [
        module
        for module in modules
        if getattr(module, "down_proj", None) is not None and torch.is_tensor(module.down_proj)
    ]
    for layer, experts in zip(source.info.moe_layers, stacks, strict=True):
        for expert in range(source.num_experts(layer)):
            gate, up, down = (dequantize(source.matrix(layer, expert, role)) for role in ("gate", "up", "down"))
            if source.info.activation == "swigluoai":
                joined, down = torch.stack([gate, up], dim=1).flatten(0, 1).t(), down.t()
            else:
                joined = torch.cat([gate, up])
            experts.gate_up_proj.data[expert], experts.down_proj.data[expert] = joined, down
    rest = [entry for name, entry in source.source.tensors.items() if name not in source.source.expert_names]
    for found in quantized_modules(rest, source.declaration):
        model.get_submodule(found.name).weight.data = dequantize(read_module(source.source, found))
    model.stacks = stacks
    return model


def logits_of(model: nn.Module, tokens: list[int]) -> Tensor:
    """`[tokens, vocabulary]` in float32."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


@dataclass
class Reference:
    """What float32 says about the prompts of a source.

    Attributes:
        model: in float32.
        prompts: token ids.
        wanted: log-probabilities of each prompt but its last token.
        bf16: the error of the same model in bfloat16.
        experts: how far log-probabilities move without experts.
    """

    model: nn.Module
    prompts: list[list[int]]
    wanted: Tensor
    bf16: float
    experts: float

    @classmethod
    def of(cls, folder: Path, floats: Path, prompts: list[list[int]]) -> Reference:
        """For a source and its transcoding to bfloat16."""
        import torch

        model = reference(folder, floats)

        def said(one: nn.Module) -> Tensor:
            return torch.cat([logits_of(one, prompt)[:-1].log_softmax(-1) for prompt in prompts])

        wanted = said(model)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        bf16 = error_of(said(model.to(torch.bfloat16)), wanted)
        for experts in model.stacks:
            experts.gate_up_proj.data.zero_()
            experts.down_proj.data.zero_()
        without = error_of(said(model.float()), wanted)
        model.load_state_dict(state)
        return cls(model, prompts, wanted, bf16, without)

    def error(self, found: list[Generated]) -> float:
        """Errors of an engine's log-probabilities of the prompts."""
        import torch

        return error_of(torch.cat([one.prompt for one in found]), self.wanted)

    def gap(self, found: list[Generated]) -> float:
        """How far an engine's greedy tokens are from the best ones at most."""
        rows = [
            logits_of(self.model, prompt + one.tokens)[len(prompt) - 1 : -1]
            for prompt, one in zip(self.prompts, found, strict=True)
        ]
        return max(gap_of(logits, one.tokens) for logits, one in zip(rows, found, strict=True))


def compare(
    source: list[Generated] | None, result: list[Generated], known: Reference, *, activations: bool
) -> dict[str, Any]:
    """Both engines' answers, or the result's alone.

    Args:
        source: what the engine made of the source, or None where it refuses it.
        result: what it made of the transcoded one.
        known: what float32 says.
        activations: the kernels of the result quantise activations otherwise than those of the source, or at all.
    """
    figures = {
        **({} if source is None else beside(source, result) | {"source_error": known.error(source)}),
        "result_error": known.error(result),
        "bf16_error": known.bf16,
        "experts": known.experts,
    }
    allowed = FACTOR * known.bf16
    apart = figures.get("apart", figures["result_error"])
    if figures.get("furthest") == 0.0:
        answer = "bits"
    elif source is not None and apart <= allowed and figures["gap"] <= GAP:
        answer = "tokens" if figures["tokens"] == figures["of"] else "near tie"
    elif figures["result_error"] <= allowed and (gap := known.gap(result)) <= GAP:
        answer, apart, figures["gap"] = "as float32", figures["result_error"], gap
    else:
        answer = "activations" if activations else "DIFFERENT"
    if answer in ("tokens", "near tie", "as float32") and known.experts < MATTERS * apart:
        answer = "blind"
    return {"answer": answer, **{key: _short(value) for key, value in figures.items()}}


def beside(source: list[Generated], result: list[Generated]) -> dict[str, float]:
    """How far two answers are apart: tokens in all places, log-probabilities where both saw the same tokens before."""
    import torch

    rows: list[tuple[Tensor, Tensor]] = []
    same, of, gap = 0, 0, 0.0
    for one, other in zip(source, result, strict=True):
        equal = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)]
        seen = 1 + next((place for place, value in enumerate(equal) if not value), len(equal))
        rows += [(one.prompt, other.prompt), (one.new[:seen], other.new[:seen])]
        same, of = same + sum(equal), of + len(equal)
        gap = max(gap, gap_of(one.new[:seen], other.tokens[:seen]))
    before, after = (torch.cat([row[side] for row in rows]) for side in (0, 1))
    return {
        "tokens": same,
        "of": of,
        "furthest": float((before - after).abs().max()),
        "apart": error_of(after, before),
        "gap": gap,
    }


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.3g}")
