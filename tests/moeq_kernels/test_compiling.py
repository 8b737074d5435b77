"""Names of machine code on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_process_finds_what_another_compiled() -> None:
    """Names of machine code do not depend on the order in which a process asks for kernels."""
    program = (
        "import json, sys\nfrom pathlib import Path\nfrom moeq_kernels.compiling import Specialisation, _file\n"
        "from moeq_kernels.gpu import GPUS\nnames = json.loads(sys.argv[1])\n"
        "files = {n: _file(Specialisation(n, (), (), frozenset(), ()), GPUS['H200']).name for n in names}\n"
        "print(json.dumps(files))"
    )
    direct = "hopper.w8a8.device.direct"
    names = [f"{direct}:few_gate_up_int8", f"{direct}:few_down_int8", "hopper.w4a16.device.wide:expert_product_wide"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    first, other = (
        json.loads(subprocess.check_output([sys.executable, "-c", program, json.dumps(order)], env=environment))
        for order in (names, names[::-1])
    )
    assert first == other
