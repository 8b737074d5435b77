"""Layers made ready once: arguments, workspace, what is compiled before use; without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases import Recipe, make_layer, route
from moeq_kernels import KernelArgumentError, PackedExperts, PackedMatrix, explain, fused_moe, prepare, warmup
from moeq_kernels.formats import find_format
from moeq_kernels.prepared import schedule

KERNELS = Path(__file__).parents[2] / "kernels"


def meta_matrix(layout: str, element: str, experts: int, n: int, k: int, group: int) -> PackedMatrix:
    """A matrix of these sizes that takes no memory."""
    fmt = find_format(layout, element)
    order = fmt.single_order if group in (-1, k) else fmt.group_order
    groups = 1 if group in (-1, k) else -(-k // group)
    kind = torch.uint8 if "uint8" in fmt.scale_dtypes else torch.bfloat16
    weight = torch.empty(experts, *fmt.weight_shape(n, k), dtype=getattr(torch, fmt.weight_dtype), device="meta")
    scale = torch.empty(experts, *fmt.scale_shape(order or "", n, groups), dtype=kind, device="meta")
    return PackedMatrix(layout, weight, n, k, element, group, scale)


def meta_experts(
    experts: int,
    hidden: int,
    intermediate: int,
    layout: str = "marlin-wna16/1",
    element: str = "int4",
    group: int = 128,
) -> PackedExperts:
    """A layer of these sizes that takes no memory."""
    return PackedExperts(
        meta_matrix(layout, element, experts, 2 * intermediate, hidden, group),
        meta_matrix(layout, element, experts, hidden, intermediate, group),
    )


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
        assert torch.equal(layer(given.x, given.weights.double(), given.ids.long()), wanted)


def test_an_expert_map_comes_with_each_call(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8, num_experts=6)
    given = route(8, 128, 6, 2, device=device)
    for order in ([0, 1, 2, 3, -1, -1], [-1, 3, -1, 1, 2, 0]):
        expert_map = torch.tensor(order, dtype=torch.int32, device=device)
        wanted = fused_moe(given.x, packed, given.weights, given.ids, expert_map=expert_map)
        assert torch.equal(layer(given.x, given.weights, given.ids, expert_map=expert_map), wanted)
    with pytest.raises(KernelArgumentError, match="expert_map is missing"):
        layer(given.x, given.weights, given.ids)
    with pytest.raises(KernelArgumentError, match="num_experts=6"):
        prepare(packed, top_k=2, max_tokens=8)(given.x, given.weights, given.ids, expert_map=expert_map)


def test_what_does_not_fit_is_refused_with_both_sides(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8)
    given = route(8, 128, 4, 2, device=device)
    x, weights, ids = given.x, given.weights, given.ids
    small = torch.empty(16, dtype=torch.uint8, device=device)
    for call, words in (
        (lambda: layer(x[:, :64], weights, ids), r"prepared for bfloat16 \[tokens, 128\]"),
        (lambda: layer(x.half(), weights, ids), "float16"),
        (lambda: layer(x, weights[:, :1], ids[:, :1]), "top_k = 2"),
        (lambda: layer(torch.cat([x, x]), torch.cat([weights] * 2), torch.cat([ids] * 2)), "at most 8"),
        (lambda: layer(x, weights, ids, out=x), "out is x"),
        (lambda: layer(x, weights, ids, out=x.float()), "like x"),
        (lambda: layer(x, weights, ids, workspace=small), r"workspace is uint8 \[16\]"),
        (lambda: layer(x, ids, weights), "topk_weights is"),
        (lambda: prepare(packed, top_k=0, max_tokens=8), "top_k is 0"),
        (lambda: prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=8), "no gpu is named"),
        (lambda: prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=8, gpu="H2000"), "unknown gpu"),
    ):
        with pytest.raises(KernelArgumentError, match=words):
            call()


def test_it_works_under_torch_compile(device: torch.device) -> None:
    packed, _ = make_layer(Recipe(), device)
    layer = prepare(packed, top_k=2, max_tokens=8)
    given = route(5, 128, 4, 2, device=device)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x * 2, given.weights, given.ids) + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(given.x), model(given.x))


def test_the_layer_says_which_kernels_run_and_why() -> None:
    hopper = prepare(meta_experts(512, 2048, 512), top_k=10, max_tokens=64, gpu="H200")
    assert (hopper.family, hopper.reason) == ("hopper-w4a16", None)
    assert "512 experts, top 10, hidden 2048, intermediate 512, marlin-wna16/1 int4" in str(hopper)
    text = explain(meta_experts(8, 256, 128), 3, top_k=2, gpu="A100")
    assert "mma-w4a16 kernels, because A100 has compute capability 8.0" in text
    assert "expert_product_mma" in text
    assert "moe_gemm" in explain(meta_experts(8, 256, 128), 3, top_k=2, gpu="MI300X")
    assert "asked for" in str(
        prepare(meta_experts(8, 256, 128), top_k=2, max_tokens=1, gpu="H200", portable=True).reason
    )


def test_nothing_falls_back_for_its_size() -> None:
    """Random layers in the range of real ones: up to 1024 experts, 32 choices, 32768 tokens, ranks of 8."""
    generator = random.Random(7)
    formats = [
        ("marlin-wna16/1", "int4"),
        ("marlin-wna16/1", "int8"),
        ("marlin-mxfp4/1", "e2m1"),
        ("int8-w8a8/1", "int8"),
    ]
    for _ in range(120):
        layout, element = generator.choice(formats)
        group = {"marlin-mxfp4/1": 32, "int8-w8a8/1": -1}.get(layout) or generator.choice([32, 64, 128, -1])
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


# Compiling is impossible in a process that interprets, and so is knowing what code depends on.
BUILDS = """
import json, random, sys
sys.path.insert(0, {tests!r})
from test_prepared import meta_experts
from moeq_kernels import prepare
from moeq_kernels.compiling import specialise
from moeq_kernels.prepared import builds, schedule
counts = []
for sizes, top_k, layout, element, group in (
    ((128, 2048, 768), 8, "marlin-wna16/1", "int4", 128),
    ((8, 4096, 1792), 2, "marlin-wna16/1", "int4", 32),
    ((32, 2944, 2880), 4, "marlin-mxfp4/1", "e2m1", 32),
    ((256, 7168, 256), 8, "int8-w8a8/1", "int8", -1),
):
    layer = prepare(meta_experts(*sizes, layout, element, group), top_k=top_k, max_tokens=5000, gpu="H200")
    wanted = builds(layer.family, layer.problem, 5000)
    counts.append(len(wanted))
    most = layer.workspace_bytes()
    for tokens in (*range(1, 200, 3), *random.Random(1).sample(range(200, 5001), 60)):
        planned = schedule(layer.family, layer.problem, tokens)
        assert planned.workspace_bytes <= layer.workspace_bytes(tokens) <= most
        missing = {{specialise(launch) for launch in planned.launches}} - wanted
        assert not missing, (tokens, missing)
print(json.dumps(counts))
"""


def _child(script: str, **variables: str) -> Any:
    """What a script prints last, as JSON, in a process that can compile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(KERNELS), str(KERNELS.parent)]), **variables}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script.format(tests=str(Path(__file__).parent))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_builds_are_few_and_no_number_of_tokens_needs_another() -> None:
    assert all(0 < count <= 60 for count in _child(BUILDS))


SCRIPT = """
import json, sys, torch
sys.path.insert(0, {tests!r})
from test_prepared import meta_experts
from moeq_kernels import prepare, warmup
from moeq_kernels.compiling import binary, specialise
from moeq_kernels.cuda import arguments_of, size_of
from moeq_kernels.prepared import schedule
layer = prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=2, gpu="H200")
first, again = warmup([layer], 2), warmup([layer, layer])

sizes = []
for launch in schedule(layer.family, layer.problem, 2).launches:
    wanted = specialise(launch)
    told = binary(wanted, layer.problem.gpu).parameters
    sizes.append([launch.kernel, list(told), [size_of(one) for one in arguments_of(launch, wanted)]])
print(json.dumps([first.kernels, first.compiled, again.kernels, again.compiled, sizes]))
"""


def test_warming_compiles_once_and_parameters_are_those_of_the_machine_code(tmp_path: Path) -> None:
    kernels, compiled, again, none, sizes = _child(SCRIPT, MOEQ_KERNEL_CACHE=str(tmp_path))
    assert kernels == compiled == again == len(list(tmp_path.iterdir())) > 0
    assert none == 0
    assert [kernel for kernel, told, passed in sizes if told != passed] == []


def test_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    import triton

    from moeq_kernels.cuda import LaunchAttribute, LaunchConfig

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("this triton comes without cuda.h")
    names = {"sharedMemBytes": LaunchConfig.shared, "hStream": LaunchConfig.stream, "attrs": LaunchConfig.attributes,
             "numAttrs": LaunchConfig.number}  # fmt: skip
    fields = "".join(f'printf("%zu ", offsetof(CUlaunchConfig, {name}));' for name in names)
    source = tmp_path / "sizes.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "cuda.h"\nint main() {'
        'printf("%zu %zu %zu ", sizeof(CUlaunchConfig), sizeof(CUlaunchAttribute), offsetof(CUlaunchAttribute, value));'
        'printf("%zu %d ", sizeof(CUtensorMap), CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);'
        f"{fields} return 0; }}"
    )
    done = subprocess.run(["cc", "-I", str(include), str(source), "-o", str(tmp_path / "sizes")], check=False)
    if done.returncode:
        pytest.skip("no C compiler")
    told = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout.split()
    config, attribute, value = ctypes.sizeof(LaunchConfig), ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset
    assert [int(one) for one in told] == [config, attribute, value, 128, 6, *(one.offset for one in names.values())]


HOOK = """
import json, sys, torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
sys.path.insert(0, {tests!r})
from test_prepared import meta_experts
from moeq_kernels import prepare
from moeq_kernels.areas import Area, Box
from moeq_kernels.prepared import schedule

class Stub:  # a driver as far as compiling needs one
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
driver.set_active(Stub())
seen = []
def hook(*given, compile, fn, **named):
    seen.append([fn.name, json.loads(compile["specialization_data"])["constant_vals"]])
triton.knobs.runtime.jit_post_compile_hook = hook
int4, int8 = meta_experts(4, 256, 128), meta_experts(4, 256, 128, "int8-w8a8/1", "int8", -1)
for experts, options in ((int4, {{}}), (int8, {{}}), (int4, {{"portable": True}})):
    layer = prepare(experts, top_k=2, max_tokens=2, gpu="H200", **options)
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    for launch in schedule(layer.family, layer.problem, 2).launches:
        roots = {{}}
        for value in launch.arguments.values():
            area = value.area if isinstance(value, Box) else value
            if isinstance(area, Area):
                roots[area.root] = memory
        values = dict(launch.arguments)
        values |= {{name: one.bind(roots) for name, one in values.items() if isinstance(one, Area | Box)}}
        launch.function.warmup(**values, **launch.constants, **launch.options, grid=launch.programs)
print(json.dumps(seen))
"""


def test_programs_that_watch_compiling_get_constants_as_json() -> None:
    """vLLM's JIT monitor sets this hook; constants that are not JSON made every call fail."""
    seen = _child(HOOK)
    names = {name for name, _ in seen}
    assert {"route_quantised", "route_few", "sum_rows", "expert_product_mma"} < names
    assert any("silu10_1.702_1.0_0.0" in constants for _, constants in seen)


def test_warming_in_the_interpreter_has_nothing_to_do(device: torch.device) -> None:
    if device.type == "cpu":
        packed, _ = make_layer(Recipe())
        assert warmup([prepare(packed, top_k=2, max_tokens=8)]).kernels == 0
