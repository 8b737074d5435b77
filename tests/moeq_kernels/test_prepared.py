"""Layers made ready once: arguments, workspace, what is compiled before use; without a GPU."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer, meta_experts, route
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from moeq_kernels import (
    KernelArgumentError,
    KernelUnsupportedError,
    explain,
    fused_moe,
    prepare,
)
from moeq_kernels.areas import Area
from moeq_kernels.formats import FORMATS, find_format
from moeq_kernels.programs import Program
from moeq_kernels.schedules import schedule


def test_a_prepared_layer_is_called_many_times_and_equals_the_simple_form(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=40, hidden_size=128)
    for tokens in (1, 7, 0, 40):
        given = route(tokens, 128, 4, 2, device=device)
        out = torch.full_like(given.x, float("nan"))
        workspace = torch.empty(layer.workspace_bytes(tokens), dtype=torch.uint8, device=device)
        y = layer(given.x, given.weights, given.ids, out=out, workspace=workspace)
        assert y.data_ptr() == out.data_ptr()
        wanted = fused_moe(given.x, packed, given.weights, given.ids)
        assert torch.equal(y, wanted)
        if tokens == 7:  # other types are converted before anything depends on the number of tokens
            assert torch.equal(layer(given.x, given.weights.double(), given.ids.long()), wanted)


def test_an_expert_map_comes_with_each_call(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, num_experts=6)
    given = route(8, 128, 6, 2, device=device)
    for order in ([0, 1, 2, 3, -1, -1], [-1, 3, -1, 1, 2, 0]):
        expert_map = torch.tensor(order, dtype=torch.int32, device=device)
        wanted = fused_moe(given.x, packed, given.weights, given.ids, expert_map=expert_map)
        assert torch.equal(layer(given.x, given.weights, given.ids, expert_map=expert_map), wanted)
    if device.type == "cpu":  # on a GPU looking would cost a synchronisation
        with pytest.raises(KernelArgumentError, match="local expert 4, but there are experts 0 to 3"):
            layer(given.x, given.weights, given.ids, expert_map=torch.arange(6) - 1)
    with pytest.raises(KernelArgumentError, match="expert_map is missing"):
        layer(given.x, given.weights, given.ids)
    with pytest.raises(KernelArgumentError, match="num_experts=6"):
        prepare(packed, top_k=2, max_tokens=8)(given.x, given.weights, given.ids, expert_map=expert_map)


def test_what_does_not_fit_is_refused_with_both_sides(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8)
    given = route(8, 128, 4, 2, device=device)
    x, weights, ids = given.x, given.weights, given.ids
    small, large = (torch.empty(count, dtype=torch.uint8, device=device) for count in (16, 2 * layer.workspace_bytes()))
    for call, words in (
        (lambda: layer(x[:, :64], weights, ids), r"prepared for bfloat16 \[tokens, 128\]"),
        (lambda: layer(x.half(), weights, ids), "float16"),
        (lambda: layer(x, weights[:, :1], ids[:, :1]), "top_k = 2"),
        (lambda: layer(torch.cat([x, x]), torch.cat([weights] * 2), torch.cat([ids] * 2)), "at most 8"),
        (lambda: layer(x, weights, ids, out=x), "out is in the memory of x"),
        (lambda: layer(x, weights, ids, out=x.view(8, 128)), "out is in the memory of x"),
        (lambda: layer(x[:7], weights[:7], ids[:7], out=x[1:]), "out is in the memory of x"),
        (lambda: layer(x, weights, ids, out=x.float()), "like x"),
        (lambda: layer(x, weights, ids, workspace=small), r"workspace is uint8 \[16\]"),
        (lambda: layer(x, weights, ids, workspace=large[::2]), r"strides \[2\]; it has to be .* contiguous"),
        (lambda: layer(x, weights, ids, workspace=large[1:]), "at a multiple of 16"),
        (lambda: layer(x, ids, weights), "topk_weights is"),
        (lambda: layer(x[0, 0], weights, ids), r"\[\]; it must be \[tokens, hidden_size\]"),
        (lambda: prepare(packed, top_k=0, max_tokens=8), "top_k is 0"),
        (lambda: prepare(packed, top_k=2, max_tokens=2.5), "max_tokens is 2.5; it must be a whole number"),
        (lambda: prepare(packed, top_k=2, max_tokens=-1), "max_tokens is -1; it must be a whole number"),
        (lambda: prepare(packed, top_k=2, max_tokens=8, dtype="bfloat16"), "dtype is 'bfloat16'"),
        (lambda: prepare(packed, top_k=2, max_tokens=8, hidden_size=-8), "hidden_size is -8"),
        (lambda: prepare(packed, top_k=2, max_tokens=8, num_experts=0), "num_experts is 0"),
        (lambda: prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=8), "no gpu is named"),
        (lambda: prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=8, gpu="H2000"), "unknown gpu"),
    ):
        with pytest.raises(KernelArgumentError, match=words):
            call()


@pytest.mark.slow
def test_it_works_under_torch_compile(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8)
    given = route(5, 128, 4, 2, device=device)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x * 2, given.weights, given.ids) + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(given.x), model(given.x))


@pytest.mark.slow
def test_it_works_where_torch_traces_without_compiling(device: torch.device) -> None:
    """Fake tensors, recorded programs, modes that watch operators, and export for any number of tokens."""
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, hidden_size=128)
    x, weights, ids = (given := route(6, 128, 4, 2, device=device)).x, given.weights, given.ids
    wanted = layer(x, weights, ids)
    with FakeTensorMode() as mode:
        fake = layer(*map(mode.from_tensor, (x, weights, ids)))
    for one in (fake, layer(*map(mode.from_tensor, (x, weights, ids)))):
        assert (one.shape, one.dtype, one.device) == (wanted.shape, wanted.dtype, wanted.device)
    for tracing in ("real", "fake", "symbolic"):
        assert torch.equal(make_fx(layer, tracing_mode=tracing)(x, weights, ids)(x, weights, ids), wanted)
    with FlopCounterMode(display=False):
        assert torch.equal(layer(x, weights, ids), wanted)
        with pytest.raises(KernelUnsupportedError, match="no gradients"):
            layer(x.clone().requires_grad_(), weights, ids).sum().backward()

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return layer(x, weights, ids)

    tokens = {0: torch.export.Dim("tokens", min=1, max=8)}
    exported = torch.export.export(Layer(), (x, weights, ids), dynamic_shapes=(tokens,) * 3).module()
    assert torch.equal(exported(x[:3], weights[:3], ids[:3]), wanted[:3])


def test_a_layer_on_meta_gives_shapes(device: torch.device) -> None:
    layer = prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=8, gpu="H200")
    x, weights = torch.empty(2, 256, dtype=torch.bfloat16, device="meta"), torch.empty(2, 2, device="meta")
    y = layer(x, weights, weights.to(torch.int32))
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)


@pytest.mark.slow
def test_a_compiled_program_may_give_it_any_strides(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, hidden_size=128)
    given = route(8, 128, 4, 2, device=device)
    strided = given.x.T.contiguous().T
    compiled = torch.compile(lambda x: layer(x, given.weights, given.ids), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(strided), layer(strided, given.weights, given.ids))


@pytest.mark.slow
def test_a_copy_is_a_layer_of_its_own(device: torch.device) -> None:
    """Also in a compiled program, where a layer is a number."""
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, hidden_size=128)
    given = route(8, 128, 4, 2, device=device)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other._tensors["w2.scale"].zero_()
        for call in (other, torch.compile(other.__call__, backend="aot_eager")):
            assert not call(given.x, given.weights, given.ids).any()
    assert layer(given.x, given.weights, given.ids).any()


def test_threads_that_call_a_layer_first_share_its_descriptors(device: torch.device, monkeypatch) -> None:
    """One each, in the order of their numbers: a kernel is handed a descriptor by its number."""

    class Driver:  # as far as descriptors need one, and slow
        def encode(self, *_given: Any) -> int:
            time.sleep(0.01)
            return 0

        def context(self, device: int) -> int:
            return 1 + device

        def set_context(self, context: int) -> int:
            return 0

        def check(self, status: int, what: str) -> None:
            assert status == 0

    monkeypatch.setattr("moeq_kernels.cuda.driver", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    layer = prepare(make_layer(Recipe(), device)[0], top_k=2, max_tokens=8)
    layer._program = Program(layer.family, layer.problem, 0, None, None)
    tensors = layer._tensors = {f"w{i}": torch.empty(64, 64) for i in range(4)}
    for i, (name, tensor) in enumerate(tensors.items()):
        layer._program.maps[Area.like(name, tensor), 0, (8, 8)] = i
    threads = [threading.Thread(target=layer._describe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made.base for made in layer._kept] == [tensor.data_ptr() for tensor in tensors.values()]
    assert layer._maps == [made.address for made in layer._kept]


@pytest.mark.slow
def test_a_backward_pass_does_not_take_it_for_a_constant(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, hidden_size=128)
    given = route(8, 128, 4, 2, device=device)
    plain = layer(given.x, given.weights, given.ids)
    given.x.requires_grad_()
    for y in (
        layer(given.x, given.weights, given.ids),
        layer(given.x, given.weights, given.ids, out=torch.empty_like(plain)),
        layer(given.x.detach(), given.weights.clone().requires_grad_(), given.ids),
        fused_moe(given.x, packed, given.weights, given.ids),
    ):
        assert torch.equal(y, plain)
        with pytest.raises(KernelUnsupportedError, match="no gradients"):
            (y + given.x).sum().backward()
    with torch.no_grad():
        assert not layer(given.x, given.weights, given.ids).requires_grad


def test_the_layer_says_which_kernels_run_and_why() -> None:
    hopper = prepare(meta_experts(512, 2048, 512), top_k=10, max_tokens=64, gpu="H200")
    assert (hopper.family, hopper.reason) == ("hopper-w4a16", None)
    assert "512 experts, top 10, hidden 2048, intermediate 512, marlin-wna16/1 int4" in str(hopper)
    predicted, runner_up = hopper.explain(64).splitlines()[-2:]
    first, second = (float(line.split()[1]) for line in (predicted, runner_up))
    assert (predicted.split()[0], runner_up.split()[0]) == ("predicted", "runner-up")
    assert 0.0 < first <= second
    text = explain(meta_experts(8, 256, 128), 3, top_k=2, gpu="A100")
    assert "mma-w4a16 kernels, because A100 has compute capability 8.0" in text
    assert "expert_product_mma" in text
    assert "moe_gemm" in explain(meta_experts(8, 256, 128), 3, top_k=2, gpu="MI300X")
    assert "asked for" in str(
        prepare(meta_experts(8, 256, 128), top_k=2, max_tokens=1, gpu="H200", portable=True).reason
    )


def test_the_interpreter_and_how_activations_are_multiplied_are_said(device: torch.device) -> None:
    fp8 = meta_experts(8, 256, 256, "fp8-block-identity/1", "e4m3", 128)
    for gpu, said in (("H200", "bfloat16 as e4m3, H200"), ("L4", "bfloat16 as e4m3, L4"),
                      ("A100", "bfloat16 as e4m3 (multiplied in bfloat16), A100")):  # fmt: skip
        layer = prepare(fp8, top_k=2, max_tokens=8, gpu=gpu, activation_dtype="fp8", portable=True)
        assert f"groups of 128, {said}: portable kernels, because portable kernels were asked for" in str(layer)
    if device.type == "cpu":
        packed, _ = make_layer(Recipe(group_size=-1), device)
        told = str(prepare(packed, top_k=2, max_tokens=8))
        assert "one scale a channel, bfloat16, Triton's interpreter: portable kernels, because " in told


#: Layouts whose groups of 16 only the portable kernels read.
WITHOUT_16 = ("marlin-wna16/1",)


def test_nothing_falls_back_for_its_size() -> None:
    """Random layers in the range of real ones: up to 1024 experts, 32 choices, 32768 tokens, ranks of 8."""
    generator = random.Random(7)
    formats = [
        ("marlin-wna16/1", "int4"),
        ("marlin-wna16/1", "int8"),
        ("marlin-mxfp4/1", "e2m1"),
        ("int8-w8a8/1", "int8"),
        ("marlin-nvfp4/1", "e2m1"),
        ("marlin-fp8/1", "e4m3"),
        ("marlin-mxfp8/1", "e4m3"),
    ]
    for _ in range(180):
        layout, element = generator.choice(formats)
        sizes = [one for one in find_format(layout, element).group_sizes if one != 256]
        group = generator.choice(sizes if layout not in WITHOUT_16 else [one for one in sizes if one != 16])
        top_k = generator.randint(1, 32)
        experts = generator.randint(top_k, 1024)
        hidden = generator.randint(2, 64) * 128
        intermediate = generator.randint(1, 112) * 128
        tokens = int(2 ** generator.uniform(0, 15))
        packed = meta_experts(experts, hidden, intermediate, layout, element, group)
        layer = prepare(packed, top_k=top_k, max_tokens=tokens, gpu=generator.choice(["H100", "H200", "H20"]))
        assert layer.reason is None, str(layer)
        planned = schedule(layer.family, layer.problem, tokens)
        for launch in planned.launches:
            assert all(0 < size < 2**31 for size in launch.programs)
            assert all(size < 65536 for size in launch.programs[1:]), launch.kernel
            assert all(abs(one) < 2**31 for one in launch.arguments.values() if isinstance(one, int)), launch.kernel


OTHERS = ["A100", "A10", "L4", "L40S", "RTX-4090", "B200", "RTX-5090", "MI300X", "MI350X"]
SMALL_FLOATS = [(*key, fmt.group_sizes[0]) for key, fmt in FORMATS.items()
                if fmt.kind == "e4m3" or fmt.group_sizes == (16,)]  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_falls_back_for_its_size_on_other_gpus(name: str) -> None:
    """The same range: NVIDIA GPUs take the mma.sync kernels where these read the layout; no launch grows too large."""
    generator = random.Random(name)
    formats = [("marlin-wna16/1", "int4", 128), ("marlin-mxfp4/1", "e2m1", 32), ("int8-w8a8/1", "int8", -1)]
    for layout, element, group in [*formats, *SMALL_FLOATS] * 2:
        top_k = generator.randint(1, 32)
        experts, tokens = generator.randint(top_k, 1024), int(2 ** generator.uniform(0, 15))
        hidden, intermediate = generator.randint(2, 64) * 128, generator.randint(1, 112) * 128
        packed = meta_experts(experts, hidden, intermediate, layout, element, group)
        dtype = getattr(torch, find_format(layout, element).dtypes[0])
        layer = prepare(packed, top_k=top_k, max_tokens=tokens, gpu=name, dtype=dtype)
        mma = layout.startswith(("marlin", "moeq-nvfp4")) and not name.startswith("MI")
        assert layer.family == ("mma-w4a16" if mma else "portable"), str(layer)
        assert "tokens" not in str(layer.reason)
        assert f"{experts} experts;" not in str(layer.reason)
        planned = schedule(layer.family, layer.problem, tokens)
        for launch in planned.launches:
            assert all(0 < size < 2**31 for size in launch.programs)
            assert all(size < 65536 for size in launch.programs[1:]), launch.kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H200", "A100", "L4", "MI300X"])
def test_the_workspace_is_the_largest_need_of_all_shorter_calls(name: str) -> None:
    formats = [("marlin-wna16/1", "int4", 128), ("int8-w8a8/1", "int8", -1), *SMALL_FLOATS[:1], *SMALL_FLOATS[-2:]]
    for layout, element, group in formats:
        fp8 = find_format(layout, element).fp8_activations
        layer = prepare(
            meta_experts(40, 512, 256, layout, element, group),
            top_k=6, max_tokens=700, gpu=name, activation_dtype="fp8" if fp8 else "",
        )  # fmt: skip
        most = 0
        for tokens in range(1, 701):
            most = max(most, schedule(layer.family, layer.problem, tokens).workspace_bytes)
            if tokens % 50 in (0, 1):
                assert layer.workspace_bytes(tokens) == most, (layout, tokens)
        assert layer.workspace_bytes() == most


@pytest.mark.cover(every=20)
@pytest.mark.parametrize(("layout", "element", "group"), SMALL_FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_own_row(layout: str, element: str, group: int, value: float, device: torch.device) -> None:
    fmt = find_format(layout, element)
    for activations in ("", "fp8") if fmt.fp8_activations else ("",):
        dtype = getattr(torch, fmt.dtypes[0])
        recipe = Recipe(layout, element, intermediate=128, group_size=group, dtype=dtype, activation_dtype=activations)
        packed, _ = make_layer(recipe, device)
        given = route(5, 128, 4, 2, dtype=dtype, device=device)
        clean = fused_moe(given.x, packed, given.weights, given.ids)
        spoilt = given.x.clone()
        spoilt[2, 7] = value
        y = fused_moe(spoilt, packed, given.weights, given.ids)
        rest = [0, 1, 3, 4]
        assert torch.equal(y[rest], clean[rest])
        assert not y[2].isfinite().all()


def test_the_operator_keeps_what_it_says(device: torch.device) -> None:
    """torch's own checks: the schema says what is written, and the fake implementation stands in for the real one."""
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8)
    given = route(3, 128, 4, 2, device=device)
    workspace = torch.zeros(layer.workspace_bytes(3), dtype=torch.uint8, device=device)
    arguments = (torch.empty_like(given.x), given.x, given.weights, given.ids, None, workspace, layer._handle)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moeq_kernels.layer.default, arguments, test_utils=checks)


def test_programs_of_portable_kernels_all_have_columns() -> None:
    layer = prepare(meta_experts(8, 256, 1280), top_k=2, max_tokens=64, gpu="MI300X")
    launches = [one for one in schedule(layer.family, layer.problem, 64).launches if "moe_gemm" in one.kernel]
    for launch, columns in zip(launches, (1280, 256), strict=True):
        tiles, width = launch.constants["TILES_N"], launch.constants["BN"]
        assert (tiles - 1) * width < columns <= tiles * width


def test_very_long_calls_of_small_layers_fit_a_grid() -> None:
    """CUDA's second axis takes 65535 programs: tiles of the mma.sync kernels lie on it."""
    for gpu in ("A100", "H200"):
        layer = prepare(meta_experts(64, 128, 64), top_k=32, max_tokens=250_000, gpu=gpu)
        for launch in schedule(layer.family, layer.problem, 250_000).launches:
            assert all(size < 65536 for size in launch.programs[1:]), launch.kernel
