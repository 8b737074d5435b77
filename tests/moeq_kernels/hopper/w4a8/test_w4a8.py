"""4-bit weights and e4m3 activations: folded scales, decoded words, and layers by the device code run on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gluon_on_cpu
from support.cases import Quantised, Recipe, make_layer, pack, random_integers, random_mxfp4, route
from support.hopper_layers import on_meta
from support.ptx_on_cpu import value
from support.reference import Layer, moe, relative_error

from bench.plan_cells import Layer as ModelLayer
from bench.shapes import SHAPES
from moeq_kernels import KernelUnsupportedError, PackedExperts, fused_moe, interpreter, prepare
from moeq_kernels.hopper import support
from moeq_kernels.hopper.w4a8.fold import SPAN, folded
from moeq_kernels.hopper.w4a8.w4a8_launches import W4a8Plan, W4a8Wide, cuts, plan_for
from moeq_kernels.hopper.w4a16.w4a16_plan import Plan
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

PLAIN = Recipe("marlin-mxfp4/1", "e2m1", experts=2, hidden=192, intermediate=128)
OAI = Recipe("marlin-mxfp4-interleaved/1", "e2m1", experts=2, hidden=192, intermediate=128, bias=True,
             order="interleaved", activation="swiglu_oai", limit=7.0)  # fmt: skip
INT4 = Recipe("marlin-wna16/1", "int4", experts=2, hidden=192, intermediate=128, group_size=64)


#: A layer in the interpreter takes five seconds of processor time; `make test` has one of either format.
PERMUTED = replace(PLAIN, layout="moeq-mxfp4/1")
QUICK = [(OAI, W4a8Wide(64, 3), 23), (INT4, W4a8Wide(64, 2), 23)]
SLOW = [
    (replace(PERMUTED, bias=True), W4a8Wide(64, 3), 23),
    (replace(PERMUTED, intermediate=192), W4a8Wide(160, 2), 150),
    (replace(INT4, group_size=32), W4a8Wide(64, 3), 70),
    (replace(PLAIN, intermediate=192, bias=True), W4a8Wide(64, 3), 23),
    (PLAIN, W4a8Wide(160, 2), 150),
    (replace(PLAIN, bias=True), W4a8Wide(160, 2), 90),
    (replace(PLAIN, intermediate=192), W4a8Wide(160, 3), 23),
    (OAI, W4a8Wide(160, 3), 170),
    (replace(INT4, group_size=32, bias=True), W4a8Wide(64, 3), 70),
    (replace(INT4, group_size=128, hidden=256), W4a8Wide(160, 2), 120),
    (replace(INT4, group_size=-1, bias=True), W4a8Wide(160, 3), 90),
    (replace(INT4, bias=True, order="interleaved", activation="swiglu_oai", limit=7.0), W4a8Wide(160, 2), 60),
]


@pytest.mark.cover(every=14)
@pytest.mark.parametrize(
    ("recipe", "kernel", "tokens"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_code_as_it_is_gives_the_layer(recipe: Recipe, kernel: W4a8Wide, tokens: int) -> None:
    """Every expert gets all tokens. 150 are a tile of 160, 90 one of 96 and 170 two: two products each.

    k of 192 ends within a step: what follows in memory is another expert's.
    """
    packed, layer = make_layer(recipe)
    _check(packed, layer, recipe.activation, recipe.limit, kernel, tokens)


def _check(
    packed: PackedExperts,
    layer: Layer,
    activation: str,
    limit: float | None,
    kernel: W4a8Wide,
    tokens: int,
    expert: int | None = None,
) -> None:
    """expert: the only one that tokens choose, once; else each gets all of them."""
    if not interpreter.active():
        pytest.skip("the kernels that sort run in Triton's interpreter here")
    experts, _, hidden = layer.w13.shape
    routed = route(tokens, hidden, experts, 2 if expert is None else 1)
    if expert is not None:
        routed.ids.fill_(expert)
    epilogue = epilogue_of(packed, activation, None, None, limit, False)
    made = prepare_for(routed.x, packed, routed.ids.shape[1], tokens, epilogue, None, family="hopper-w4a8")
    gpu = replace(made.problem.gpu, multiprocessors=2)
    planned = schedule("hopper-w4a8", replace(made.problem, gpu=gpu), tokens, W4a8Plan(kernel))
    y = torch.empty_like(routed.x)
    workspace = torch.full((planned.workspace_bytes,), 255, dtype=torch.uint8)
    roots = {"x": routed.x, "topk_weights": routed.weights, "topk_ids": routed.ids, "out": y, "workspace": workspace}
    gluon_on_cpu.run_all(planned.launches, roots | made._tensors)
    truth = moe(routed.x, layer, routed.weights, routed.ids)
    quantised = moe(routed.x, layer, routed.weights, routed.ids, dtype=torch.bfloat16, fp8_groups=-1)
    assert relative_error(y, truth) <= 1.05 * relative_error(quantised, truth)
    assert relative_error(y, quantised) <= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        (64, torch.float16),
        pytest.param(32, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_int4_scales_may_be_zero_negative_and_far_apart(group: int, dtype: torch.dtype) -> None:
    """Sums are divided by scales; those of a whole feature may be zero as well, or only the first or the last ones."""
    generator = torch.Generator().manual_seed(group)
    matrices = []
    for n, k in ((256, 256), (256, 128)):
        one = random_integers(
            (2, n, k), bits=4, group_size=group, zero_points=False, dtype=torch.float32, generator=generator
        )
        scales = one.scales * torch.exp2(torch.randint(-8, 4, one.scales.shape, generator=generator))
        scales *= torch.randint(-1, 2, scales.shape, generator=generator)
        scales[:, 5] = 0
        scales = scales.to(dtype)
        values = (one.codes.float() - 8) * scales.float().repeat_interleave(group, 2)
        matrices.append(replace(one, scales=scales, values=values))
    packed = PackedExperts(*(pack("marlin-wna16/1", "int4", one) for one in matrices))
    layer = Layer(*(one.values for one in matrices))
    _check(packed, layer, "silu", None, W4a8Wide(64, 2), 40)


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_scales_of_the_next_expert_do_not_count(group: int) -> None:
    """k of 192 ends within a step of 128; what lies behind an expert's scales is the next one's, here NaN."""
    packed, layer = make_layer(replace(INT4, group_size=group, intermediate=192))
    for matrix, values in ((packed.w13, layer.w13), (packed.w2, layer.w2)):
        matrix.scale[1] = torch.nan
        values[1] = torch.nan
    _check(packed, layer, "silu", None, W4a8Wide(64, 2), 20, expert=0)


def _both(matrix: Quantised, layout: str = "marlin-mxfp4/1") -> PackedExperts:
    one = pack(layout, "e2m1", matrix)
    return PackedExperts(one, one)


def _order() -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the operand's rows, map B of `w4a16.device.layouts`, and k of its columns."""
    row, k = torch.arange(128), torch.arange(32)
    column = 64 * (row >> 5 & 1) + 32 * (row >> 4 & 1) + 16 * (row >> 6) + (row & 15)
    return column, (k & 16) | (k & 15) >> 2 << 1 | (k >> 1 & 1) | (k & 1) << 3


def test_int4_words_become_the_codes_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = random_integers(
        (1, 128, 128), bits=4, group_size=64, zero_points=False, dtype=torch.bfloat16, generator=generator
    )
    packed = pack("marlin-wna16/1", "int4", matrix)
    device = gluon_on_cpu._module("moeq_kernels.hopper.w4a8.device.codes")
    column, source = _order()
    for slab in range(0, 8, 2):
        words = packed.weight[0, slab : slab + 2].view(2, 2, 128).transpose(0, 1).contiguous()
        found = device.int4_operand(value(words.view(torch.uint8).view(2, 2, 512)), 64)
        assert torch.equal(torch.as_tensor(found.float()), matrix.codes[0, column][:, 16 * slab + source].float() - 8)
    scales = packed.scale[0, 1].view(2, 8, 8)
    assert torch.equal(torch.as_tensor(device.row_scales(value(scales), 64)), matrix.scales[0, column, 1])


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("layout", ["marlin-mxfp4/1", "moeq-mxfp4/1"])
@pytest.mark.parametrize("seed", range(5))
def test_words_become_the_weights_exactly_over_factors(seed: int, layout: str) -> None:
    """Every scale of a feature up to 2^14 below the largest; groups of zeros with any scale."""
    generator = torch.Generator().manual_seed(seed)
    matrix = random_mxfp4((1, 128, 128), generator=generator)
    scales = torch.randint(100, 101 + SPAN, (1, 128, 4), generator=generator, dtype=torch.uint8)
    codes = matrix.codes.clone()
    codes[0, 5, 32:64] = 8  # minus zero
    scales[0, 5, 1] = seed
    made = folded(_both(replace(matrix, codes=codes, scales=scales), layout)).w13
    permuted = layout == "moeq-mxfp4/1"
    device = gluon_on_cpu._module("moeq_kernels.hopper.w4a8.device.codes")
    column, source = _order()
    single = (column & -31) | ((column & 6) << 2) | ((column & 24) >> 2)
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    for group in range(4):
        words = made.weight[0, 2 * group : 2 * group + 2].view(2, 2, 128).transpose(0, 1).contiguous()
        shifts = made.exponent_shift[0, group].view(2, 8, 8)
        found = device.e2m1_operand(value(words.view(torch.uint8).view(2, 2, 512)), value(shifts), 64, permuted)
        code = codes[0, column][:, 32 * group + source].int()
        wanted = table[code & 7] * torch.where(code > 7, -1.0, 1.0)
        wanted = torch.where(wanted == 0, wanted, wanted * torch.exp2(scales[0, column, group, None].float() - 127))
        assert torch.equal(torch.as_tensor(found.float()) * made.scale_factor[0, single, None], wanted)


@pytest.mark.parametrize(
    ("scale", "what"), [(100 + SPAN + 1, r"scales from 2\^-27 to 2\^-12, but"), (255, "a scale that is NaN")]
)
@pytest.mark.parametrize("feature", [7, 41, 94])
def test_scales_that_e5m2_cannot_hold_are_refused(scale: int, what: str, feature: int) -> None:
    matrix = random_mxfp4((3, 128, 64), generator=torch.Generator().manual_seed(1))
    scales = torch.full((3, 128, 2), 100, dtype=torch.uint8)
    scales[2, feature, 1] = scale
    given = replace(_both(replace(matrix, scales=scales)), name="layer 5")
    with pytest.raises(KernelUnsupportedError, match=what) as caught:
        folded(given)
    assert f"w13 of layer 5: feature {feature} of expert 2 has" in str(caught.value)
    assert "1 features of 1 of 3 experts" in str(caught.value)


def test_one_scale_a_feature_is_refused() -> None:
    packed, _ = make_layer(replace(PLAIN, intermediate=32))
    with pytest.raises(KernelUnsupportedError, match="no scales of groups"):
        folded(packed)


@pytest.mark.parametrize("recipe", [PLAIN, OAI, PERMUTED])
def test_who_asks_gets_this_kernel_on_hopper(recipe: Recipe) -> None:
    experts = on_meta(make_layer(recipe)[0])
    options = {"top_k": 2, "max_tokens": 300, "activation": recipe.activation, "limit": recipe.limit}
    assert prepare(experts, gpu="H200", **options).family == "hopper-w4a16"
    layer = prepare(experts, gpu="H200", activation_dtype="fp8", **options)
    assert (layer.family, layer.reason) == ("hopper-w4a8", None)
    assert "bfloat16 as e4m3" in str(layer)
    assert {type(one) for one, *_ in cuts(layer.problem, 300)[1]} >= {Plan, W4a8Plan}
    asked = experts.quantising("fp8")  # as `moeq.load_experts` gives them
    assert prepare(asked, gpu="H200", **options).family == "hopper-w4a8"
    assert prepare(asked, gpu="H200", activation_dtype="", **options).family == "hopper-w4a16"


@pytest.mark.parametrize("kind", ["int4-fp8", "mxfp4-fp8", "moeq-mxfp4-fp8"])
def test_few_tokens_run_in_the_kernels_for_16_bit_activations(kind: str) -> None:
    for gpu in ("H100", "H200"):
        problem = ModelLayer(kind, "qwen3-30b-a3b", SHAPES["qwen3-30b-a3b"], gpu).problem
        for tokens in (1, 7, 64, 128):
            plan = plan_for(problem, tokens)
            assert not isinstance(plan, W4a8Plan)
            assert _launches("hopper-w4a8", problem, tokens, None) == _launches("hopper-w4a16", problem, tokens, plan)
        kernels = [name for name, *_ in _launches("hopper-w4a8", problem, 4096, None)]
        assert sum(name.endswith(":w4a8_product_wide") for name in kernels) == 2


def _launches(family: str, problem: Problem, tokens: int, plan: Plan | None) -> list[tuple[object, ...]]:
    found = schedule(family, problem, tokens, plan).launches
    return [(one.kernel, one.programs, one.constants, sorted(one.arguments)) for one in found]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"gpu": "A100"}, "A100 has compute capability 8.0"),
        ({"gpu": "MI300X"}, "not an NVIDIA GPU"),
        ({"gpu": "H200", "hidden_size": 184}, "x has 184 features"),
        ({"gpu": "H200", "router_weight_on_input": True}, "router weights multiply the input"),
        ({"gpu": "H200", "portable": True}, "a layer of `prepare` has them on Hopper"),
    ],
)
def test_where_it_cannot_run_the_reason_is_said(options: dict, what: str) -> None:
    experts = on_meta(make_layer(PLAIN)[0])
    with pytest.raises(KernelUnsupportedError) as caught:
        prepare(experts, top_k=2, max_tokens=8, activation_dtype="fp8", **options)
    assert what in f"{caught.value} {caught.value.hint}"


def test_another_order_of_bits_names_the_layouts_that_do() -> None:
    experts = on_meta(make_layer(replace(PLAIN, layout="marlin-nvfp4/1", group_size=16))[0])
    with pytest.raises(KernelUnsupportedError) as caught:
        prepare(experts, top_k=2, max_tokens=8, activation_dtype="fp8", gpu="H200")
    known = "of e2m1, in layers of `prepare` on Hopper: marlin-mxfp4/1, marlin-mxfp4-interleaved/1, moeq-mxfp4/1"
    assert known in str(caught.value.hint)


def test_a_call_does_not_fold_scales() -> None:
    packed, _ = make_layer(PLAIN)
    routed = route(3, 192, 2, 2)
    with pytest.raises(KernelUnsupportedError, match="fp8 activations") as caught:
        fused_moe(routed.x, packed, routed.weights, routed.ids, activation_dtype="fp8")
    assert "prepare" in str(caught.value.hint)


def test_nobody_gets_this_kernel_who_did_not_ask() -> None:
    packed, _ = make_layer(PLAIN)
    epilogue = epilogue_of(packed, "silu", None, None, None, False)
    x = torch.empty(0, 192, dtype=torch.bfloat16)
    problem = replace(prepare_for(x, packed, 2, 64, epilogue, None).problem, interpret=False)
    assert list(support.w4a8_reasons(problem)) == []
    assert support.family(problem) == "hopper-w4a16"
    odd = replace(problem, hidden=184, w13=replace(problem.w13, layout="marlin-nvfp4/1"))
    assert len(list(support.w4a8_reasons(odd))) == 2
    odd = replace(problem, hidden=184, w13=replace(problem.w13, group_size=-1, global_scale=problem.w13.scale))
    assert len(list(support.w4a8_reasons(odd))) == 3
    assert {type(one) for one, *_ in cuts(problem, 48)[1]} >= {Plan, W4a8Plan}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"zero_points": True}, "w13 has zero points; these kernels read codes around 8"),
        ({"group_size": 16}, "w13 has groups of 16; these kernels read 32, 64, 128"),
    ],
)
def test_int4_that_it_cannot_read_is_refused(change: dict, what: str) -> None:
    experts = on_meta(make_layer(replace(INT4, **change))[0])
    with pytest.raises(KernelUnsupportedError, match=what) as caught:
        prepare(experts, top_k=2, max_tokens=8, gpu="H200", activation_dtype="fp8")
    assert "multiplies 16-bit activations" in str(caught.value.hint)


def test_int4_gets_it_where_e4m3_activations_are_asked_for() -> None:
    experts = on_meta(make_layer(INT4)[0])
    assert prepare(experts, top_k=2, max_tokens=300, gpu="H200").family == "hopper-w4a16"
    layer = prepare(experts, top_k=2, max_tokens=300, gpu="H200", activation_dtype="fp8")
    assert layer.family == "hopper-w4a8"
    assert {type(one) for one, *_ in cuts(layer.problem, 300)[1]} >= {Plan, W4a8Plan}
