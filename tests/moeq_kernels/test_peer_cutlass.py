"""vLLM's CUTLASS contenders in vLLM's own Python on a CPU: its operators are written out in plain torch.

So weights, scales, buffers and every argument are checked against the installed vLLM; how the real operator orders the
reordered words, which only that operator reads, is not.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import shapes
from bench.peers.contenders import vllm_cutlass
from bench.peers.problem import Codes, Problem, Stack, make_problem, route, truth
from bench.shapes import Group, Shape

KINDS = {"int4-fp8": vllm_cutlass.CutlassW4A8, "fp8-w8a8": vllm_cutlass.Cutlass}


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU: the functions that ask for that are plain torch."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(part: Codes) -> Codes:
    return replace(part, codes=part.codes.as_subclass(OnGpu), scales=part.scales.as_subclass(OnGpu))


def quantise(result: Tensor, x: Tensor, scale: Tensor, _bound: Tensor | None) -> None:
    scale.copy_(x.abs().amax(1, keepdim=True).float() / 448)
    result.copy_((x.float() / scale).clamp(-448, 448))


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def multiples(scales: Tensor) -> Tensor:
    """Every scale -8 to -1 times, rounded to its own type: what 4-bit codes become, up to the sign."""
    return (scales.float()[..., None] * torch.arange(-8, 0)).to(scales.dtype).flatten()


def sizes_of(offsets: Tensor, first: Tensor, second: Tensor, n: int, k: int, swap: bool) -> None:
    for sizes, rows, columns in ((first, 2 * n, k), (second, k, n)):
        for expert, count in enumerate(offsets.diff().tolist()):
            sizes[expert] = torch.tensor([rows, count, columns] if swap else [count, rows, columns])


def products(out: Tensor, a: Tensor, weights: list[Tensor], scales: tuple[Tensor, Tensor], offsets: Tensor) -> None:
    """Multiply the rows of every expert; rows have a scale, and output features."""
    for expert, (start, stop) in enumerate(zip(offsets, [*offsets[1:], len(a)], strict=True)):
        y = a[start:stop].float() @ weights[expert].T
        out[start:stop] = y * scales[0][start:stop] * scales[1][expert].flatten()


def w4a8_products(
    out: Tensor, a: Tensor, words: Tensor, a_scales: Tensor, channels: Tensor, packed: Tensor, group: int,
    offsets: Tensor, sizes: Tensor, a_strides: Tensor, _b_strides: Tensor, c_strides: Tensor, s_strides: Tensor,
    _schedule: str | None,
) -> None:  # fmt: skip
    experts, n, k = words.shape[0], words.shape[1], words.shape[2] * 8
    assert [one.tolist() for one in (a_strides, c_strides, s_strides)] == [
        [k] * experts, [n] * experts, [[n, 0]] * experts
    ]  # fmt: skip
    assert sizes.tolist() == [[n, rows, k] for rows in [*offsets.diff().tolist(), len(a) - int(offsets[-1])]]
    assert (a.shape[1], group, a_scales.shape, channels.shape) == (k, 128, (len(a), 1), (experts, n, 1))
    table = packed.view(experts, k // group, n, 8).transpose(1, 2).repeat_interleave(group, 2).float()
    codes = ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2).long()
    signed = torch.where(codes > 7, codes - 16, codes)
    found = table.gather(-1, (8 - signed.abs()).clamp(max=7)[..., None])[..., 0]
    weights = torch.where(signed == 0, 0.0, torch.where(signed < 0, found, -found))
    products(out, a, list(weights), (a_scales, channels), offsets)


def fp8_products(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, _sizes: Tensor,
    a_strides: Tensor, b_strides: Tensor, c_strides: Tensor, per_token: bool, per_channel: bool,
) -> None:  # fmt: skip
    assert (per_token, per_channel) == (True, True)
    experts, n, k = b.shape
    assert torch.stack([a_strides, b_strides, c_strides]).tolist() == [[k] * experts, [k] * experts, [n] * experts]
    products(out, a, list(b.float()), (a_scales, b_scales), offsets)


def permute(
    x: Tensor, ids: Tensor, pairs: Tensor, _map: Tensor | None, experts: int, _local: int, top_k: int, permuted: Tensor,
    offsets: Tensor, inverse: Tensor, index: Tensor, *_buffers: Tensor,
) -> None:  # fmt: skip
    assert torch.equal(pairs.flatten(), torch.arange(ids.numel()))
    order = ids.flatten().sort(stable=True).indices
    permuted.copy_(x[order // top_k])
    offsets.copy_(torch.cat([torch.zeros(1), ids.flatten().bincount(minlength=experts).cumsum(0)]))
    inverse.copy_(order.argsort().view(ids.shape))
    index.copy_(order)


def unpermute(rows: Tensor, weights: Tensor, inverse: Tensor, _offsets: Tensor, _top_k: int, out: Tensor) -> None:
    out.copy_((rows.float()[inverse.long()].view(*weights.shape, -1) * weights[..., None]).sum(1))


OPERATORS = {
    "_C": {
        "cutlass_encode_and_reorder_int4b_grouped": lambda words: (words.clone(), torch.zeros(len(words), 9)),
        "cutlass_pack_scale_fp8": multiples,
        "cutlass_w4a8_moe_mm": w4a8_products,
        "cutlass_moe_mm": fp8_products,
        "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": sizes_of,
        "dynamic_per_token_scaled_fp8_quant": quantise,
        "silu_and_mul": silu_and_mul,
    },
    "_moe_C": {
        "moe_permute_unpermute_supported": lambda: True,
        "moe_permute_sort_workspace_size": lambda rows, experts: rows * experts,
        "moe_permute_with_scratch": permute,
        "moe_unpermute": unpermute,
    },
}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cutlass_moe")
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.w8a8_utils")
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(4, 2, 192, 384))
    monkeypatch.setattr(utils, "cutlass_group_gemm_supported", lambda: True)
    monkeypatch.setattr(vllm_cutlass, "load_vllm", lambda: None)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=lambda: None))
    for space, operators in OPERATORS.items():
        for name, operator in operators.items():
            monkeypatch.setattr(getattr(torch.ops, space), name, operator, raising=False)


def problem_of(name: str) -> Problem:
    problem = make_problem(Group(name, "tiny"), "cpu")
    return replace(problem, w13=on_gpu(problem.w13), w2=on_gpu(problem.w2))


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_through_the_engines_python(name: str, tokens: int) -> None:
    contender, problem = KINDS[name](), problem_of(name)
    weights = contender.prepare(problem)
    inputs = contender.inputs(weights, route(problem, tokens, 0))
    assert inputs.scratch.max_expanded_rows == 2 * tokens, "a graph would hold what a call makes"
    wanted = truth(make_problem(problem.group, "cpu"), tokens)
    for _ in range(2):  # a call leaves nothing behind in its buffers
        inputs.output.fill_(float("nan"))
        y = contender.run(weights, inputs)[:, : problem.shape.hidden]
        assert wanted.error(y) <= contender.factor * wanted.plain_error


def test_weights_are_the_engines_own() -> None:
    """Signed codes, the least k lowest; e4m3 scales of at most 56, so that 8 of them are an e4m3 number too."""
    problem = problem_of("int4-fp8")
    made = vllm_cutlass.CutlassW4A8().prepare(problem).arguments
    part = problem.padded(256, 512)[1]
    words, channels = (made[name].as_subclass(torch.Tensor) for name in ("w2", "w2_chan_scale"))
    codes = ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2)
    assert torch.equal((codes + 8) & 15, part.codes.int())
    scales = made["w2_scale"].as_subclass(torch.Tensor).float().view(4, 4, 256, 8)[..., 7].transpose(1, 2).neg()
    assert (scales.max(), channels.dtype, made["w2_scale"].dtype) == (56, torch.float32, torch.float8_e4m3fn)
    folded = ((codes.float() + 8) % 16 - 8) * (scales * channels).repeat_interleave(128, -1)
    values = torch.stack([Stack(part, problem.format)[expert] for expert in range(4)])
    assert torch.allclose(folded, values, rtol=2**-4, atol=0)
