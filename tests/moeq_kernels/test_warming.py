"""What is compiled before use, and that calls are handed what it was compiled for; without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer

from moeq_kernels import cuda, prepare, replay, warmup
from moeq_kernels.errors import KernelEnvironmentError

# Compiling is impossible in a process that interprets, and so is knowing what code depends on.
BUILDS = """
import json, random
from support.cases import meta_experts
from moeq_kernels import prepare
from moeq_kernels.compiling import specialise
from moeq_kernels.schedules import builds, piece_tokens, schedule
counts = []
for sizes, top_k, layout, element, group, gpu, fp8 in (
    ((128, 2048, 768), 8, "marlin-wna16/1", "int4", 128, "H200", ""),
    ((8, 4096, 1792), 2, "marlin-wna16/1", "int4", 32, "H200", ""),
    ((32, 2944, 2880), 4, "marlin-mxfp4/1", "e2m1", 32, "H200", ""),
    ((256, 7168, 256), 8, "int8-w8a8/1", "int8", -1, "H200", ""),
    ((512, 2048, 512), 10, "marlin-wna16/1", "int4", 128, "A100", ""),
    ((256, 7168, 256), 8, "int8-w8a8/1", "int8", -1, "L4", ""),
    ((128, 2048, 768), 8, "marlin-nvfp4/1", "e2m1", 16, "H200", ""),
    ((256, 7168, 256), 8, "fp8-block-identity/1", "e4m3", 128, "H200", "fp8"),
    ((16, 5120, 1024), 1, "marlin-fp8/1", "e4m3", -1, "A100", "fp8"),
):
    experts = meta_experts(*sizes, layout, element, group)
    layer = prepare(experts, top_k=top_k, max_tokens=5000, gpu=gpu, activation_dtype=fp8)
    wanted = builds(layer.family, layer.problem, 5000)
    counts.append(len(wanted))
    most = layer.workspace_bytes()
    for tokens in (*range(1, 200, 3), *random.Random(1).sample(range(200, 5001), 60)):
        planned = schedule(layer.family, layer.problem, tokens)
        assert planned.workspace_bytes <= layer.workspace_bytes(tokens) <= most
        missing = {{specialise(launch) for launch in planned.launches}} - wanted
        assert not missing, (tokens, missing)
for sizes, top_k, layout, gpu in (
    ((512, 8192, 128), 22, "marlin-wna16/1", "H200"),
    ((64, 2048, 1408), 6, "marlin-wna16/1", "A10"),
    ((64, 1088, 704), 7, "triton-wna16/1", "L4"),
):
    layer = prepare(meta_experts(*sizes, layout), top_k=top_k, max_tokens=120000, gpu=gpu)
    wanted = builds(layer.family, layer.problem, 120000)
    piece = piece_tokens(layer.family, layer.problem)
    assert 1000 < piece < 119000
    for tokens in (piece + 1, piece + 5, piece + 700, 2 * piece + 3, 120000):
        planned = schedule(layer.family, layer.problem, tokens)
        missing = {{specialise(launch) for launch in planned.launches}} - wanted
        assert not missing, (tokens, missing)
print(json.dumps(counts))
"""


def _child(script: str, **variables: str) -> Any:
    """What a script prints last, as JSON, in a process that can compile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script.format(tests=str(Path(__file__).parent))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_builds_are_few_and_no_number_of_tokens_needs_another() -> None:
    assert all(0 < count <= 60 for count in _child(BUILDS))


SCRIPT = """
import json, torch
from support.cases import meta_experts
from moeq_kernels import prepare, warmup
from moeq_kernels.compiling import binary, specialise
from moeq_kernels.cuda import arguments_of, size_of
from moeq_kernels.schedules import schedule
layer = prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=2, gpu="H200")
first, again = warmup([layer], 2), warmup([layer, layer])

sizes = []
for launch in schedule(layer.family, layer.problem, 2).launches:
    wanted = specialise(launch)
    told = binary(wanted, layer.problem.gpu).parameters
    sizes.append([launch.kernel, list(told), [size_of(one) for one in arguments_of(launch, wanted)]])
print(json.dumps([first.kernels, first.compiled, again.kernels, again.compiled, sizes]))
"""


@pytest.mark.slow
def test_warming_compiles_once_and_parameters_are_those_of_the_machine_code(tmp_path: Path) -> None:
    kernels, compiled, again, none, sizes = _child(SCRIPT, MOEQ_KERNEL_CACHE=str(tmp_path))
    assert kernels == compiled == again == len(list(tmp_path.iterdir())) > 0
    assert none == 0
    assert [kernel for kernel, told, passed in sizes if told != passed] == []


def test_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    import triton

    from moeq_kernels.cuda import LaunchAttribute, LaunchConfig
    from moeq_kernels.replay import NodeParams

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("this triton comes without cuda.h")
    names = {"sharedMemBytes": LaunchConfig.shared, "hStream": LaunchConfig.stream, "attrs": LaunchConfig.attributes,
             "numAttrs": LaunchConfig.number}  # fmt: skip
    fields = "".join(f'printf("%zu ", offsetof(CUlaunchConfig, {name}));' for name in names)
    node = ("func", "gridDimX", "blockDimX", "sharedMemBytes", "kernelParams", "extra", "kern", "ctx")
    fields += "".join(f'printf("%zu ", offsetof(CUDA_KERNEL_NODE_PARAMS_v2, {name}));' for name in node)
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
    params = [getattr(NodeParams, name).offset for name, *_ in NodeParams._fields_]
    wanted = [config, attribute, value, 128, 6, *(one.offset for one in names.values()), *params]
    assert [int(one) for one in told] == wanted


HOOK = """
import json, torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from support.cases import meta_experts
from moeq_kernels import prepare
from moeq_kernels.areas import Area, Box
from moeq_kernels.schedules import schedule

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
fp8, nvfp4 = (meta_experts(4, 256, 128, *one) for one in (("fp8-block-identity/1", "e4m3", 128),
                                                         ("marlin-nvfp4/1", "e2m1", 16)))
for experts, options in ((int4, {{}}), (int8, {{}}), (int4, {{"portable": True}}), (nvfp4, {{}}),
                         (fp8, {{"activation_dtype": "fp8"}}),
                         (fp8, {{"activation_dtype": "fp8", "portable": True}})):
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


@pytest.mark.slow
def test_programs_that_watch_compiling_get_constants_as_json() -> None:
    """vLLM's JIT monitor sets this hook; constants that are not JSON made every call fail."""
    seen = _child(HOOK)
    names = {name for name, _ in seen}
    hopper = {"route_quantised", "route_few", "sum_rows", "w8a8_product_narrow"}
    assert hopper | {"expert_product_mma", "moe_gemm", "quantize_rows_e4m3"} < names
    assert any("silu10_1.702_1.0_0.0" in constants for _, constants in seen)


def test_warming_in_the_interpreter_has_nothing_to_do(device: torch.device) -> None:
    if device.type == "cpu":
        packed, _ = make_layer(Recipe())
        assert warmup([prepare(packed, top_k=2, max_tokens=8)]).kernels == 0


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(KernelEnvironmentError, match="the CUDA driver cannot be loaded: libcuda"):
        cuda.Driver()
    with pytest.raises(KernelEnvironmentError, match="the CUDA driver has no such graphs: libcuda"):
        replay.Graphs()
