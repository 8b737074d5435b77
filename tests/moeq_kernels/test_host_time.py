"""Descriptors whose area moves, against a driver that writes down what it was told; in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, random, sys
from pathlib import Path
import torch
from support.pretended_driver import driver
driver(Path(sys.argv[1]))
from moeq_kernels import cuda
cuda.enter(0)
from moeq_kernels.areas import Area
area = Area.of("x", torch.bfloat16, 64, 128)
moving = cuda.MovingMap(area, 3, (32, 64), 128)
draw, found = random.Random(0), {}
for _ in range(500):
    base = 16 * draw.randrange(1, 3 * cuda.MAX_KEPT_MAPS)
    address = moving.at(base)
    assert address % 64 == 0
    assert ctypes.c_uint64.from_address(address).value == base
    found.setdefault(base, set()).add(address)
assert len(set().union(*found.values())) == cuda.MAX_KEPT_MAPS
one = moving.at(16)
for base in range(32, 32 + 16 * (cuda.MAX_KEPT_MAPS - 1), 16):
    assert moving.at(base) != one
ctypes.c_uint64.from_address(one).value = 0
assert moving.at(16) == one and ctypes.c_uint64.from_address(one).value == 0, "encoded again though it was kept"
print("good")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_a_moving_descriptor_always_points_at_its_area(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["good"], done.stderr[-2000:]
