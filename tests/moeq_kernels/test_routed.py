"""Layers that choose experts from logits: the kernel beside `route`, and calls beside those with its results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer, meta_experts
from support.pretended_driver import take_cpu
from support.routing_launches import problem_of
from torch._subclasses.fake_tensor import FakeTensorMode

from moeq_kernels import KernelArgumentError, KernelUnsupportedError, Router, prepare, programs, route, routing
from moeq_kernels.launch import run_with_triton
from moeq_kernels.routed import RoutedLayer
from moeq_kernels.routing import Choosing

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def choose(
    logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None, padding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel alone, with results that begin as other numbers."""
    tokens, experts = logits.shape
    choosing = Choosing(router, logits.dtype, None if bias is None else bias.dtype, padding is not None)
    problem = problem_of(experts, router.top_k, 256, interpret=logits.device.type == "cpu")
    weights = torch.full((tokens, router.top_k), 7.0, device=logits.device)
    ids = torch.full((tokens, router.top_k), 77, dtype=torch.int32, device=logits.device)
    roots = {"logits": logits, "topk_weights": weights, "topk_ids": ids}
    roots |= {} if bias is None else {"correction_bias": bias}
    roots |= {} if padding is None else {"padding": padding.view(torch.uint8)}
    run_with_triton([choosing.launch(problem, tokens)], roots)
    return weights, ids


def random_case(seed: int, device: torch.device) -> tuple[torch.Tensor, Router, Any, Any]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups, size = draw.choice((1, 1, 1, 2, 3, 4, 8)), draw.choice((1, 2, 3, 5, 8, 16, 20, 32))
    experts, kept, tokens = groups * size, draw.randint(1, groups), draw.randint(1, 5)
    top_k = draw.randint(1, min(10, kept * size))
    score: Any = draw.choice(("max", "top2"))
    scoring: Any = draw.choice(("softmax", "sigmoid"))
    router = Router(top_k, scoring, draw.random() < 0.5, draw.choice((1.0, 2.5)), groups, kept, score)
    logits = torch.randn(tokens, experts, generator=generator) * draw.choice((0.1, 1, 5))
    logits = logits.round() if draw.random() < 0.2 else logits  # ties
    bias = torch.randn(experts, generator=generator).to(draw.choice(FLOATS)) if draw.random() < 0.6 else None
    padding = torch.rand(tokens, generator=generator) < 0.3 if draw.random() < 0.5 else None
    given = (logits.to(draw.choice(FLOATS)), bias, padding)
    logits, bias, padding = (None if one is None else one.to(device) for one in given)
    assert logits is not None
    return logits, router, bias, padding


def compare(seed: int, device: torch.device) -> None:
    logits, router, bias, padding = random_case(seed, device)
    weights, ids = choose(logits, router, bias, padding)
    wanted, wanted_ids = route(logits, router, bias)
    if padding is not None:
        wanted, wanted_ids = wanted.masked_fill(padding[:, None], 0.0), wanted_ids.masked_fill(padding[:, None], -1)
    assert torch.equal(ids, wanted_ids), (seed, router)
    assert torch.allclose(weights, wanted, rtol=1e-5, atol=1e-7), (seed, router)


@pytest.mark.parametrize("seed", range(24))
def test_random_rules_choose_as_route_does(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MANY_TOKENS", 3)  # programs of one token, and of four of which some do not exist
    compare(seed, device)


@pytest.mark.slow
def test_many_random_rules_choose_as_route_does(device: torch.device) -> None:
    for seed in range(1000, 1400):
        compare(seed, device)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("grouped", [False, True])
def test_numbers_that_are_none_still_choose_different_experts(
    scoring: Any, grouped: bool, device: torch.device
) -> None:
    values = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1.0, -float("nan"), 3.0]
    logits = torch.tensor([values, [float("nan")] * 8, [float("-inf")] * 8, [-float("nan")] * 8], device=device)
    groups = (2, 1, "top2") if grouped else (1, 1, "max")
    _, ids = choose(logits, Router(4, scoring, True, 1.0, *groups))  # type: ignore[arg-type]
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert all(0 <= one < 8 for one in row)


def test_logits_that_round_to_one_probability_are_told_apart(device: torch.device) -> None:
    """Beside 200 all others have the probability 0, which `route` cannot tell apart."""
    logits = torch.tensor([[200.0, 1.0, 3.0, 2.0]], device=device)
    weights, ids = choose(logits, Router(3))
    assert (weights.tolist(), ids.tolist()) == ([[1.0, 0.0, 0.0]], [[0, 2, 3]])


def test_the_best_two_of_a_group_are_added_as_probabilities(device: torch.device) -> None:
    """Logits would prefer the second group (3 + 3 > 5 + 0.5), probabilities the first (e^5 + e^0.5 > 2 e^3)."""
    logits = torch.tensor([[5.0, 0.5, 3.0, 3.0]], device=device)
    router = Router(2, num_groups=2, topk_groups=1, group_score="top2")
    assert choose(logits, router)[1].tolist() == route(logits, router)[1].tolist() == [[0, 1]]


def test_zeros_of_both_signs_are_one_number(device: torch.device) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]], device=device)
    assert choose(logits, Router(3))[1].tolist() == [[0, 1, 2]]


@pytest.fixture(scope="module")
def packed(device: torch.device) -> Any:
    return make_layer(Recipe(experts=8, hidden=128, intermediate=64), device)[0]


def batch(device: torch.device, tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 128, generator=generator).to(device, torch.bfloat16)
    return x, torch.randn(tokens, 8, generator=generator).to(device)


def test_a_call_is_one_of_the_layer_with_the_routes_results(packed: Any, device: torch.device) -> None:
    layer = prepare(packed, top_k=2, max_tokens=16)
    bias = torch.linspace(-0.5, 0.5, 8, device=device)
    routed = RoutedLayer(layer, Router(2, "sigmoid", scaling_factor=2.5), torch.bfloat16, torch.float32)
    x, logits = batch(device)
    padding = torch.tensor([False, True, False, False, True, False], device=device)
    workspace = torch.empty(routed.workspace_bytes(6), dtype=torch.uint8, device=device)
    out = torch.empty_like(x)
    found = routed(x, logits, correction_bias=bias, padding=padding, out=out, workspace=workspace)
    wanted = layer(x, *route(logits.bfloat16(), routed.choosing.router, bias))
    assert found is out
    assert not found[padding].any()
    assert torch.allclose(found[~padding].float(), wanted[~padding].float(), rtol=0.01, atol=1e-3)
    with pytest.raises(KernelArgumentError, match="workspace is"):
        routed(x, logits, correction_bias=bias, workspace=workspace[: len(workspace) - 256])


def test_experts_of_other_ranks_are_left_out(packed: Any, device: torch.device) -> None:
    layer = prepare(packed, top_k=2, max_tokens=16, num_experts=16)
    routed = RoutedLayer(layer, Router(2))
    x = batch(device)[0]
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(device)
    expert_map = torch.full((16,), -1, dtype=torch.int32, device=device)
    expert_map[4:12] = torch.arange(8, dtype=torch.int32, device=device)
    found = routed(x, logits, expert_map=expert_map)
    wanted = layer(x, *route(logits, Router(2)), expert_map=expert_map)
    assert torch.allclose(found.float(), wanted.float(), rtol=0.01, atol=1e-3)
    with pytest.raises(KernelArgumentError, match="expert_map is missing"):
        routed(x, logits)


def test_what_kernels_do_not_take_runs_in_torch(packed: Any, device: torch.device) -> None:
    layer = prepare(packed, top_k=2, max_tokens=16)
    routed = RoutedLayer(layer, Router(2))
    x, logits = batch(device)
    wanted = routed(x, logits)
    assert routed(x[:0], logits[:0]).shape == (0, 128)
    moved = torch.empty(6 * 128 + 1, dtype=x.dtype, device=device)[1:].view(6, 128).copy_(x)
    assert torch.allclose(routed(moved, logits).float(), wanted.float(), rtol=0.01, atol=1e-3)
    padding = torch.zeros(6, dtype=torch.bool, device=device)
    padding[3] = True
    assert not routed(moved, logits, padding=padding)[3].any()
    logits.requires_grad_()
    with pytest.raises(KernelUnsupportedError, match="no gradients"):
        routed(x, logits).sum().backward()


def test_a_recorded_call_runs_in_torch(packed: Any, device: torch.device) -> None:
    """Fake tensors have no addresses, and a compiled program gets one operator."""
    layer = prepare(packed, top_k=2, max_tokens=16)
    routed = RoutedLayer(layer, Router(2))
    x, logits = batch(device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert routed(mode.from_tensor(x), mode.from_tensor(logits)).shape == x.shape
    compiled = torch.compile(lambda x, logits: routed(x, logits), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, logits), layer(x, *route(logits, Router(2))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(6, 7)}, r"logits are float32 \[6, 7\].* must be floating \[6, 8\]"),
        ({"logits": torch.zeros(5, 8)}, r"must be floating \[6, 8\]"),
        ({"logits": torch.zeros(6, 8, dtype=torch.int32)}, "must be floating"),
        ({"correction_bias": torch.zeros(8)}, "correction_bias is given; the layer was prepared without bias_dtype"),
        ({"padding": torch.zeros(5, dtype=torch.bool)}, r"padding must be bool \[6\]"),
        ({"padding": torch.zeros(6, dtype=torch.uint8)}, r"padding must be bool \[6\]"),
        ({"padding": torch.zeros(6, dtype=torch.bool, device="meta")}, r"padding must be bool \[6\]"),
        ({"logits": torch.zeros(6, 8, device="meta")}, "logits are float32 .* on meta; .* must be"),
        ({"x": torch.zeros(6, 64, dtype=torch.bfloat16)}, r"prepared for bfloat16 \[tokens, 128\]"),
        ({"x": torch.zeros(17, 128, dtype=torch.bfloat16)}, "for at most 16"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor], message: str, packed: Any, device: torch.device
) -> None:
    routed = RoutedLayer(prepare(packed, top_k=2, max_tokens=16), Router(2))
    x, logits = batch(device)
    moved = {name: one if one.is_meta else one.to(device) for name, one in change.items()}
    given = {"x": x, "logits": logits} | moved
    with pytest.raises(KernelArgumentError, match=message):
        routed(**given)


def test_rules_that_do_not_fit_are_refused(packed: Any, device: torch.device) -> None:
    layer = prepare(packed, top_k=2, max_tokens=16)
    with pytest.raises(KernelArgumentError, match="the router chooses 3 experts; the layer was prepared for top_k = 2"):
        RoutedLayer(layer, Router(3))
    with pytest.raises(KernelArgumentError, match="8 experts in 3 groups"):
        RoutedLayer(layer, Router(2, num_groups=3))
    x, logits = batch(device)
    biased = RoutedLayer(layer, Router(2), bias_dtype=torch.float32)
    with pytest.raises(KernelArgumentError, match="correction_bias is missing"):
        biased(x, logits)
    with pytest.raises(KernelArgumentError, match=r"correction_bias is float32 \[7\]"):
        biased(x, logits, correction_bias=torch.zeros(7, device=device))


def test_it_says_what_it_is_and_needs_no_gpu_to_be_planned() -> None:
    layer = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=64, gpu="H200")
    routed = RoutedLayer(layer, Router(2))
    assert str(routed) == f"{layer}, experts chosen from logits"
    x, logits = torch.empty(3, 512, dtype=torch.bfloat16, device="meta"), torch.empty(3, 8, device="meta")
    assert routed(x, logits).shape == (3, 512)
    assert routed.workspace_bytes() == -(-layer.workspace_bytes() // 256) * 256 + 2 * 512
    assert routed.workspace_bytes(1) == -(-layer.workspace_bytes(1) // 256) * 256 + 2 * 256


class Bound:
    """Launches that note what they are run with."""

    workspace_bytes = 4096

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def run(self, addresses: list[int], maps: list[int], stream: int) -> None:
        self.runs.append(list(addresses))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_call_hands_over_the_addresses_of_its_roots(
    masked: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    programs.program_of.cache_clear()
    layer = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=64, gpu="H200")
    take_cpu(layer)
    layer.device = torch.device("cpu")
    routed = RoutedLayer(layer, Router(2), bias_dtype=torch.float32 if biased else None)
    program = layer.program(routed._masked if masked else routed.choosing)
    bound = program.bounds[33] = Bound()
    names = ["logits", *(["correction_bias"] if biased else []), *(["padding"] if masked else [])]
    moving = ["x", "topk_weights", "topk_ids", "out", "workspace", "expert_map"]
    assert program.roots == (*moving, *names, *layer._program.weights)
    assert program.maps is layer._program.maps
    sizes = {"x": (33, 512), "logits": (33, 8), "correction_bias": (8,), "out": (33, 512)}
    given = {name: torch.zeros(size, dtype=torch.bfloat16 if size[-1] == 512 else None) for name, size in sizes.items()}
    given["padding"], given["workspace"] = torch.zeros(33, dtype=torch.bool), torch.empty(4096, dtype=torch.uint8)
    wanted = [name for name in given if name not in ("correction_bias", "padding") or name in names]
    routed(**{name: given[name] for name in wanted})
    place = given["workspace"].data_ptr()
    chosen = place + 4096 - 2 * 512  # 33 tokens' weights take 264 bytes
    brought = [given[name].data_ptr() for name in names]
    given["logits"] = torch.zeros(33 * 8 + 1)[1:].view(33, 8)
    routed(**{name: given[name] for name in wanted})
    moved = bound.runs.pop()[6]
    assert moved % 16 == 0
    assert moved != given["logits"].data_ptr()
    roots = [given["x"].data_ptr(), chosen, chosen + 512, given["out"].data_ptr(), place, 0, *brought]
    assert bound.runs == [[*roots, *layer.weight_addresses]]
