"""Machine code on disk: its names, what is done about files that are damaged, and the processes that compile."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq_kernels import compiling
from moeq_kernels.areas import Area, Box
from moeq_kernels.compiling import (
    Binary,
    Specialisation,
    Warmed,
    _parse,
    binary,
    compile_all,
    compile_one,
    parameters_of,
    specialise,
    stored,
)
from moeq_kernels.errors import KernelEnvironmentError
from moeq_kernels.gpu import GPUS
from moeq_kernels.launch import Launch


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


WANTED = Specialisation("device.routing:gather_rows", (("x", "*bf16"),), (("TOKENS", 4),), frozenset({"x"}), ())


def kernel_parameters(**plain: bool) -> Any:
    return SimpleNamespace(params=[SimpleNamespace(name=name, do_not_specialize=one) for name, one in plain.items()])


class Handmade(Launch):
    """A launch of a kernel that nobody wrote: constants come first, and all but `count...` is specialised."""

    @property
    def function(self) -> Any:
        names = {**self.constants, **self.arguments}
        return kernel_parameters(**{name: name.startswith("count") for name in names})


@pytest.mark.parametrize(
    ("value", "kind", "aligned"),
    [
        (0, "i32", True),
        (2, "i32", False),
        (16, "i32", True),
        (-16, "i32", True),
        (24, "i32", False),
        (2**31 - 1, "i32", False),
        (2**31, "i64", True),
        (-(2**31), "i32", True),
        (-(2**31) - 1, "i64", False),
        (-(2**31) - 16, "i64", True),
        (Area.of("x", torch.bfloat16, 3), "*bf16", True),
        (Area.of("x", torch.float8_e4m3fn, 3, offset=32), "*fp8e4nv", True),
        (Area.of("x", torch.int64, 3, offset=8), "*i64", False),
        (Box(Area.of("x", torch.uint8, 8, 64), (2, 64), "layout"), "tensordesc<u8[2, 64],'layout'>", False),
    ],
)
def test_a_build_depends_on_types_and_multiples_of_16(value: Any, kind: str, aligned: bool) -> None:
    launch = Handmade("a:b", (1,), {"one": value}, {"Z": 3, "A": 1}, {"num_warps": 4, "maxnreg": 80})
    wanted = Specialisation(
        "a:b",
        (("one", kind),),
        (("A", 1), ("Z", 3)),
        frozenset({"one"} if aligned else ()),
        (("maxnreg", 80), ("num_warps", 4)),
    )
    assert specialise(launch) == wanted


def test_ones_and_missing_areas_are_constants_and_counts_are_not_looked_at() -> None:
    launch = Handmade("a:b", (1,), {"one": 1, "none": None, "count": 1, "counts": 32, "many": 1}, {"Z": 3})
    found = specialise(launch)
    assert found.types == (("count", "i32"), ("counts", "i32"))
    assert found.constants == (("Z", 3), ("many", 1), ("none", None), ("one", 1))
    assert found.aligned == frozenset()


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"),
                                             ("int64", "i64"), ("int32", "i32"), ("int16", "i16"), ("int8", "i8"),
                                             ("uint8", "u8"), ("float8_e4m3fn", "fp8e4nv")])  # fmt: skip
def test_types_have_tritons_names(dtype: str, name: str) -> None:
    launch = Handmade("a:b", (1,), {"x": Area.of("x", getattr(torch, dtype), 2)}, {})
    assert specialise(launch).types == (("x", f"*{name}"),)


def test_parameters_are_read_from_ptx() -> None:
    text = """//
.version 8.7
.visible .func nothing(.param .b64 a) { ret; }
.visible .entry kernel_0(
\t.param .u64 .ptr .global .align 1 kernel_0_param_0,
\t.param .align 64 .b8 kernel_0_param_1[128],
\t.param .u32 kernel_0_param_2,
\t.param .align 8 .b8 kernel_0_param_3[16],
\t.param .u64 .ptr .global .align 1 kernel_0_param_4
)
.reqntid 128
{ .param .b32 later; }
"""
    assert parameters_of(text) == (8, 128, 4, 16, 8)


def test_triton_is_told_types_constants_and_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    def kernel(x, many, TOKENS, count):  # type: ignore[no-untyped-def]
        pass

    told = []
    function = JITFunction(kernel)
    monkeypatch.setattr("moeq_kernels.device.routing.gather_rows", function)
    monkeypatch.setattr(triton, "compile", lambda source, target, options: told.append((source, target, options)) or 5)
    wanted = Specialisation(
        "device.routing:gather_rows",
        (("x", "*bf16"), ("many", "i32"), ("count", "i32")),
        (("TOKENS", 4),),
        frozenset({"x", "count"}),
        (("num_warps", 8),),
    )
    assert compile_one(wanted, GPUS["H200"]) == 5
    ((source, target, options),) = told
    assert (target.backend, target.arch, target.warp_size, options) == ("cuda", 90, 32, {"num_warps": 8})
    assert source.fn is function
    assert source.signature == {"x": "*bf16", "many": "i32", "TOKENS": "constexpr", "count": "i32"}
    assert source.constants == {(2,): 4}
    assert source.attrs == {(0,): [["tt.divisibility", 16]], (3,): [["tt.divisibility", 16]]}
    compile_one(wanted, GPUS["MI300X"])
    assert (told[1][1].backend, told[1][1].arch, told[1][1].warp_size) == ("hip", "gfx942", 64)


def test_an_interpreter_compiles_nothing() -> None:
    with pytest.raises(KernelEnvironmentError, match="cannot be compiled in the interpreter") as caught:
        compile_one(WANTED, GPUS["H200"])
    assert caught.value.hint == "unset TRITON_INTERPRET"


def compiled(**metadata: Any) -> Any:
    """What Triton gives for a kernel with one pointer and one descriptor."""
    asm = {
        "ptx": ".entry k(.param .u64 .ptr .global .align 1 k_0, .param .align 64 .b8 k_1[128])",
        "cubin": b"\x7fELF\n",
    }
    found = {"name": "k", "num_warps": 4, "shared": 1000, "global_scratch_size": 0, "profile_scratch_size": 0}
    boxes = [{"swizzle": 3, "block_size": [8, 64]}]
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(**{**found, "tensordesc_meta": boxes, **metadata}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", str(tmp_path / "codes"))
    return tmp_path / "codes"


def test_a_build_is_compiled_once_and_read_after_that(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    monkeypatch.setattr(compiling, "compile_one", lambda *given: builds.append(given) or compiled())
    gpu = GPUS["H200"]
    assert stored(WANTED, gpu) is None
    made = binary(WANTED, gpu)
    assert made == Binary(b"\x7fELF\n", "k", 4, 1000, ((3, (8, 64)),), (8, 128))
    assert stored(WANTED, gpu) == binary(WANTED, gpu) == made
    assert builds == [(WANTED, gpu)]
    (path,) = cache.iterdir()
    assert path.name.startswith("gather_rows-sm90-")
    assert len(path.name) == len("gather_rows-sm90-") + 32
    digest, head, code = path.read_bytes().split(b"\n", 2)
    assert digest == hashlib.sha256(head + b"\n" + code).hexdigest().encode()
    about = {"name": "k", "warps": 4, "shared": 1000, "boxes": [[3, [8, 64]]], "parameters": [8, 128]}
    assert (json.loads(head), code) == (about, b"\x7fELF\n")
    others = {"types": (), "constants": (), "aligned": frozenset(), "options": (("num_warps", 8),), "kernel": "a:b"}
    for name, value in others.items():
        assert stored(replace(WANTED, **{name: value}), gpu) is None
    assert stored(WANTED, GPUS["A100"]) is None


def test_a_build_that_cannot_be_kept_is_returned(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_one", lambda *_: compiled(tensordesc_meta=None))
    cache.write_text("a file in the folder's place")
    assert binary(WANTED, GPUS["H200"]) == Binary(b"\x7fELF\n", "k", 4, 1000, (), (8, 128))
    assert stored(WANTED, GPUS["H200"]) is None


@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size"])
def test_a_build_that_needs_scratch_memory_is_refused(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_one", lambda *_: compiled(**{name: 128}))
    with pytest.raises(KernelEnvironmentError, match=r"^device\.routing:gather_rows needs scratch memory"):
        binary(WANTED, GPUS["H200"])
    assert not cache.exists() or not list(cache.iterdir())


def sealed(head: bytes, code: bytes = b"code") -> bytes:
    rest = head + b"\n" + code
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


GOOD = {"name": "k", "warps": 4, "shared": 0, "boxes": [[0, [1]]], "parameters": [8]}


@pytest.mark.parametrize(
    "head",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000,
     *(json.dumps({key: value for key, value in GOOD.items() if key != name}).encode() for name in GOOD),
     *(json.dumps({**GOOD, name: None}).encode() for name in GOOD if name != "name"),
     json.dumps({**GOOD, "boxes": [[0]]}).encode(), json.dumps({**GOOD, "parameters": ["x"]}).encode()],
)  # fmt: skip
def test_a_file_with_the_right_digest_and_no_build_is_compiled_again(head: bytes) -> None:
    assert _parse(sealed(json.dumps(GOOD).encode())) == Binary(b"code", "k", 4, 0, ((0, (1,)),), (8,))
    assert _parse(sealed(head)) is None
    assert _parse(sealed(json.dumps(GOOD).encode())[:-1]) is None


#: Processes that compile: what a kernel is called decides what becomes of it.
WORKER = """
import os
from pathlib import Path
from moeq_kernels import compiling
def stored(wanted, gpu):
    return 5 if wanted.kernel == "kept:0" else None
def binary(wanted, gpu):
    print("a word of the compiler")
    assert "TRITON_INTERPRET" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "" and gpu.name == "H200"
    if wanted.kernel == "bad:0":
        raise ValueError("x" * 600)
    Path(os.environ["MOEQ_DONE"], f"{wanted.kernel}-{os.getpid()}-{os.getsid(0)}").touch()
compiling.stored, compiling.binary = stored, binary
compiling.work()
"""


def named(*kernels: str, types: int = 0) -> list[Specialisation]:
    return [Specialisation(one, (("x", "i32"),) * types, (), frozenset(), ()) for one in kernels]


@pytest.fixture
def done(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiling, "_WORKER", WORKER)
    monkeypatch.setenv("MOEQ_DONE", str(tmp_path / "done"))
    (tmp_path / "done").mkdir()
    return tmp_path / "done"


def test_processes_of_their_own_session_compile_what_is_missing(done: Path) -> None:
    tasks = [*named(*(f"new:{n}" for n in range(5))), *named("kept:0"), *named("new:0")]
    found = compile_all(tasks, GPUS["H200"], workers=2)
    assert (found.kernels, found.compiled, found.kept) == (6, 5, False)  # nothing came into this folder
    assert found.seconds > 0
    told = [path.name.rsplit("-", 2) for path in done.iterdir()]
    assert sorted(kernel for kernel, *_ in told) == ["kept:0", *(f"new:{n}" for n in range(5))]
    processes = {(pid, session) for _, pid, session in told}
    assert 1 <= len(processes) <= 2
    assert all(pid == session != str(os.getsid(0)) for pid, session in processes)


def test_the_longest_builds_begin_first(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    order: list[str] = []
    monkeypatch.setattr(compiling, "_feed", lambda tasks, gpu: [order.append(one.kernel) for one in tasks] and 2)
    tasks = [Specialisation(f"k:{t}{c}", (("x", "i32"),) * t, (("C", 1),) * c, frozenset(), ())
             for t, c in ((1, 1), (3, 2), (0, 0), (1, 3))]  # fmt: skip
    found = compile_all(tasks, GPUS["H200"], workers=1)
    assert order == ["k:32", "k:13", "k:11", "k:00"]
    assert (found.kernels, found.compiled) == (4, 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert compile_all(tasks, GPUS["H200"]).compiled == 6  # one process per CPU
    assert compile_all(tasks[:1], GPUS["H200"], workers=9).compiled == 2  # and no more than there is to do


def test_a_kernel_that_does_not_compile_ends_the_others(done: Path) -> None:
    with pytest.raises(KernelEnvironmentError, match=r"^bad:0 does not compile: ValueError: x{500}$"):
        compile_all([*named("bad:0", types=1), *named(*(f"new:{n}" for n in range(3)))], GPUS["H200"], workers=1)
    assert list(done.iterdir()) == []


def test_nothing_to_compile_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_WORKER", "raise SystemExit(9)")
    assert compile_all([], GPUS["H200"]).compiled == 0
    monkeypatch.setattr(compiling, "stored", lambda wanted, gpu: 5)
    found = compile_all(named("a:0", "b:0"), GPUS["H200"])
    assert (found.kernels, found.compiled, found.kept) == (2, 0, True)
    monkeypatch.setattr(compiling, "_feed", lambda tasks, gpu: 1)
    later = iter([None, 5])
    monkeypatch.setattr(compiling, "stored", lambda wanted, gpu: next(later))
    assert compile_all(named("a:0"), GPUS["H200"]).kept


def test_warm_ups_add_up() -> None:
    total = Warmed(3, 1, 0.5) + Warmed(4, 2, 0.25)
    assert total == Warmed(7, 3, 0.75, True)
    assert not (Warmed(0, 0, 0.0, False) + total).kept
    assert not (total + Warmed(0, 0, 0.0, False)).kept


@pytest.mark.parametrize(
    ("kind", "said"),
    [("link", " is a link"), ("file", "Not a directory: "), ("open", " has mode 0755; chmod 700 makes it usable")],
)
def test_why_a_cache_is_not_used_is_said(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"cache-{kind}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o755)
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", str(path))
    assert compiling.code_cache() is None
    (record,) = caplog.records
    assert said in record.getMessage()
    assert str(path) in record.getMessage()
