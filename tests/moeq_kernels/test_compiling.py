"""Machine code on disk: its names, what is done about files that are damaged, and the processes that compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeq_kernels.compiling import Specialisation, compile_all
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.gpu import GPUS


@pytest.mark.slow
def test_a_process_finds_what_another_compiled() -> None:
    """Names of machine code do not depend on the order in which a process asks for kernels."""
    program = (
        "import json, sys\nfrom moeq_kernels.compiling import Specialisation, _file\n"
        "from moeq_kernels.gpu import GPUS\nnames = json.loads(sys.argv[1])\n"
        "files = {n: _file(Specialisation(n, (), (), frozenset(), ()), GPUS['H200']) for n in names}\n"
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


KEPT = """
import os
from pathlib import Path
from support.cases import meta_experts
from moeq_kernels import prepare
from moeq_kernels.compiling import binary, stored
from moeq_kernels.schedules import builds

layer = prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=1, gpu="H200")
wanted, gpu = min(builds(layer.family, layer.problem, 1), key=lambda one: one.kernel), layer.problem.gpu
made = binary(wanted, gpu)
assert stored(wanted, gpu) == made
(path,) = Path(os.environ["MOEQ_KERNEL_CACHE"]).iterdir()
assert path.stat().st_mode & 0o777 == 0o600
whole = path.read_bytes()
flipped = bytearray(whole)
flipped[-100] ^= 1
for damaged in (b"", b"\\n", whole[:-1], whole[:40], bytes(flipped), whole.replace(b'"warps": 4', b'"warps": 8'),
                whole.partition(b"\\n")[2]):
    assert damaged != whole
    path.write_bytes(damaged)
    assert stored(wanted, gpu) is None
assert binary(wanted, gpu) == made
assert path.read_bytes() == whole
path.unlink()
path.mkdir()  # cannot be replaced: nothing is left beside it
assert binary(wanted, gpu) == made
assert list(path.parent.iterdir()) == [path]
"""


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    assert child(KEPT, MOEQ_KERNEL_CACHE=str(tmp_path)) == ""


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(
    "worker", ["import os; os.close(0); import time; time.sleep(1); os._exit(9)", "import os; os._exit(9)"]
)
def test_a_process_that_ends_early_is_an_error_of_the_machine(worker: str, tmp_path: Path, monkeypatch) -> None:
    """The system ended it, for want of memory for example; before it was given something, or while it worked."""
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr("moeq_kernels.compiling._WORKER", worker)
    tasks = [Specialisation(f"nothing:{i}", (), (), frozenset(), ()) for i in range(3)]
    with pytest.raises(KernelEnvironmentError, match="ended early, with exit code 9"):
        compile_all(tasks, GPUS["H200"], workers=2)


INTERRUPTED = """
import os, signal, threading, time
from support.cases import meta_experts
from moeq_kernels import prepare

def interrupt():
    while not os.listdir(os.environ["MOEQ_KERNEL_CACHE"]):
        time.sleep(0.01)
    os.killpg(0, signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
layer = prepare(meta_experts(4, 256, 128), top_k=2, max_tokens=4096, gpu="H200")
threading.Thread(target=interrupt).start()
try:
    layer.warm()
except KeyboardInterrupt:
    print(len(os.listdir(os.environ["MOEQ_KERNEL_CACHE"])))
"""


@pytest.mark.slow
def test_an_interruption_ends_soon_and_without_a_word(tmp_path: Path) -> None:
    """Ctrl-C comes to all processes of a session: those that compile have their own, end what they are at, no more."""
    told = child(INTERRUPTED, start_new_session=True, MOEQ_KERNEL_CACHE=str(tmp_path))
    assert 1 <= int(told) <= 1 + 2 * len(os.sched_getaffinity(0))


def child(program: str, start_new_session: bool = False, **variables: str) -> str:
    """What a program prints in a process that can compile; it must say nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=start_new_session,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
