"""Archives for a GPU machine: device code taken out of libraries, files chosen, sizes shared out."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.bundle.__main__ import CUBLAS, cublas_12, unpack, uploads, wanted
from bench.bundle.fatbin import MACHINE, PTX, Entry, containers, kept, trimmed
from bench.bundle.parts import PARTS, Part


def test_machine_code_is_kept_or_the_newest_ptx_that_runs() -> None:
    code = [Entry(MACHINE, 80, 0, 1), Entry(MACHINE, 90, 1, 1), Entry(PTX, 80, 2, 1), Entry(PTX, 100, 3, 1)]
    assert kept(code, 90) == [code[1]]
    assert kept(code, 86) == [code[2]]
    assert kept(code, 75) == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_real_library_loses_the_code_of_other_gpus_only(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text("__global__ void one(float *x) { x[threadIdx.x] *= 2; }\n")
    targets = ["-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90,code=sm_90"]
    build = ["nvcc", "-shared", "-Xcompiler=-fPIC", "-cudart=none", *targets, "-o", tmp_path / "one.so"]
    built = subprocess.run([*build, tmp_path / "one.cu"], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"nvcc does not build a library here: {built.stderr[-200:]}")
    data = (tmp_path / "one.so").read_bytes()
    entries = [entry for found in containers(data) for entry in found]
    assert {(entry.kind, entry.architecture) for entry in entries} >= {(MACHINE, 80), (MACHINE, 90), (PTX, 80)}
    after = trimmed(data, 90)
    assert len(after) == len(data)
    for entry in entries:
        before = data[entry.start : entry.start + entry.size]
        left = after[entry.start : entry.start + entry.size]
        staying = (entry.kind, entry.architecture) == (MACHINE, 90)
        assert left == (before if staying else bytes(entry.size))
    assert sum(one != two for one, two in zip(data, after, strict=True)) <= sum(entry.size for entry in entries)


def test_a_library_without_device_code_stays_as_it_is() -> None:
    data = Path(sys.executable).resolve().read_bytes()
    assert struct.unpack_from("<4s", data)[0] == b"\x7fELF"
    assert trimmed(data, 90) == data


def test_chosen_files_go_where_they_belong(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        for name in ("one/a.py", "one/b.so", "nvidia/lib/libx.so.12", "one/c.txt"):
            wheel.writestr(name, name)
    part = Part("", (), keep=("one/*", "*/libx.so.12"), drop=("*.txt",), libraries=("*/libx.so.12",))
    unpack(part, [tmp_path / "one.whl"], tmp_path / "out", 90)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"site/one/a.py", "site/one/b.so", "lib/libx.so.12"}


def test_uploads_hold_what_fits() -> None:
    assert list(uploads({"a": 30, "b": 15, "c": 9}, 40)) == [["a", "c"], ["b"]]
    with pytest.raises(ValueError, match="a has"):
        list(uploads({"a": 41}, 40))


def test_operators_and_python_files_of_vllm_are_in_different_parts() -> None:
    name = "vllm/_C_stable_libtorch.abi3.so"
    ours = {part: one for part, one in PARTS.items() if any(wheel.startswith("vllm") for wheel in one.wheels)}
    assert [part for part, one in ours.items() if wanted(name, one)] == ["vllm"]
    assert wanted("vllm/__init__.py", PARTS["python"])
    assert not wanted("vllm/third_party/deep_gemm/_C.cpython-311-x86_64-linux-gnu.so", PARTS["deep_gemm"])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_calls_of_cublas_12_arrive_in_cublas_13_with_all_arguments(tmp_path: Path) -> None:
    """19 arguments of `cublasGemmEx`, most of them on the stack."""
    cublas_12(tmp_path)
    names = ", ".join(f"long a{index}" for index in range(19))
    total = " + ".join(f"{index + 1} * a{index}" for index in range(19))
    others = "".join(f"int {name}(void) {{ return 7; }}\n" for name in CUBLAS if name != "cublasGemmEx")
    (tmp_path / "real.c").write_text(f"int cublasGemmEx({names}) {{ return {total}; }}\n{others}")
    newer = tmp_path / "libcublas.so.13"
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "real.c", "-o", newer, "-Wl,-soname,libcublas.so.13"],
                   check=True)  # fmt: skip
    script = (
        f"import ctypes; ctypes.CDLL({str(newer)!r}); l = ctypes.CDLL({str(tmp_path / 'libcublas.so.12')!r})\n"
        "print(l.cublasGemmEx(*[ctypes.c_long(i) for i in range(19)]), l.cublasCreate_v2())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sum((i + 1) * i for i in range(19))), "7"]
    assert ctypes.sizeof(ctypes.c_long) == 8
