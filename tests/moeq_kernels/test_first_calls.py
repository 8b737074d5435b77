"""First calls of a layer in threads that have done nothing with a GPU yet, or while somebody captures; warming.

Against the driver of `support.pretended_driver`, which refuses what a real one refuses there. Nothing is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import re, sys, threading
from pathlib import Path
import torch
from support.pretended_driver import driver, pretend_cuda, take_cpu
library = driver(Path(sys.argv[1]))
pretend_cuda()
from support.cases import meta_experts
from moeq_kernels import cuda, prepare
from moeq_kernels.replay import REPLAY_AFTER

def built(wanted, gpu):  # in place of the compiler
    sizes, boxes = [], []
    for _, kind in wanted.types:
        if kind.startswith("tensordesc"):
            block = tuple(map(int, re.search(r"\\[([0-9, ]+)\\]", kind)[1].split(",")))
            boxes.append((0, block))
            sizes += [cuda.MAP_BYTES, *[4] * len(block), *[8] * len(block)]
        else:
            sizes.append(4 if kind == "i32" else 8)
    return cuda.Binary(b"code", "kernel", 4, 1 << 16, tuple(boxes), (*sizes, 8, 8))

cuda.binary = built

def layer_of(group):
    layer = prepare(meta_experts(8, 512, 256, group=group), top_k=2, max_tokens=512, gpu="H200")
    take_cpu(layer)
    return layer

def call(layer, tokens):
    x = torch.zeros(tokens, 512, dtype=torch.bfloat16)
    layer(x, torch.zeros(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int32))

def in_a_new_thread(*calls):
    failed = []
    def run():
        try:
            for one in calls:
                call(*one)
        except Exception as error:
            failed.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    print(repr(failed[0]) if failed else "good")

layer, other = layer_of(128), layer_of(128)
in_a_new_thread((layer, 24))                  # of all calls
in_a_new_thread((layer, 24))                  # bound already
in_a_new_thread((layer, 400))                 # another number of tokens
in_a_new_thread((other, 24))                  # descriptors of other weights
in_a_new_thread(*[(layer, 24)] * (REPLAY_AFTER + 2))
in_a_new_thread((layer, 24))                  # replays
before = library.counted_launches()
library.somebody_captures(1)
in_a_new_thread((layer_of(64), 24))           # kernels that are not loaded yet
library.somebody_captures(0)
assert library.counted_launches() > before
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_first_calls_need_nothing_of_their_thread_and_spoil_no_capture(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["good"] * 7


WARMING = """
import torch
from support.pretended_driver import pretend_cuda
pretend_cuda()
from support.cases import meta_experts
from moeq_kernels import cuda, prepare, warming, warmup
from moeq_kernels.compiling import Warmed
loaded, compiled = set(), {}

def compile_all(wanted, gpu):  # in place of the compiler
    compiled[gpu.name] = wanted
    return Warmed(len(wanted), 0, 0.0)

warming.compile_all = compile_all
cuda.load = lambda wanted, gpu, device: loaded.add((device, gpu.name, wanted))
layers = []
for gpu, device in (("H200", "cuda:0"), ("A100", "cuda:1"), ("H200", "cuda:0"), ("L4", "meta")):
    layer = prepare(meta_experts(8, 512, 256), top_k=2, max_tokens=64, gpu=gpu)
    layer.device, layer.is_direct = torch.device(device), device != "meta"
    layers.append(layer)
warmup(iter(layers))
for place in sorted({one[:2] for one in loaded}):
    print(*place, {one[2] for one in loaded if one[:2] == place} == compiled[place[1]])
print(*sorted(compiled))
"""


@pytest.mark.slow
def test_each_gpu_loads_what_its_own_layers_need() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", WARMING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["0 H200 True", "1 A100 True", "A100 H200 L4"]
