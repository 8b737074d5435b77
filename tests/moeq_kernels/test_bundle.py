"""Archives for a GPU machine: device code taken out of libraries, files chosen, sizes shared out."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.bundle import flashinfer_module
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
        program = zipfile.ZipInfo("one/compile")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, "")
    part = Part("", (), keep=("one/*", "*/libx.so.12"), drop=("*.txt",), libraries=("*/libx.so.12",))
    unpack(part, [tmp_path / "one.whl"], tmp_path / "out", 90)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"site/one/a.py", "site/one/b.so", "site/one/compile", "lib/libx.so.12"}
    assert os.access(tmp_path / "out/site/one/compile", os.X_OK)
    assert not os.access(tmp_path / "out/site/one/a.py", os.X_OK)


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


class TestFlashInferModule:
    @pytest.fixture
    def made(self, tmp_path: Path) -> flashinfer_module.Kit:
        (tmp_path / "cuda" / "bin").mkdir(parents=True)
        (tmp_path / "cuda" / "lib64").mkdir()
        (tmp_path / "out" / "objects").mkdir(parents=True)
        (tmp_path / "out" / "generated").mkdir()
        empty = tmp_path / "empty.c"
        empty.write_text("")
        subprocess.run(["gcc", "-shared", empty, "-o", tmp_path / "cuda/lib64/libcudart.so"], check=True)
        return flashinfer_module.Kit(tmp_path, (), tmp_path / "cuda/bin/nvcc", tmp_path / "out")

    def test_what_is_not_built_throws_and_says_so(self, made: flashinfer_module.Kit) -> None:
        """Called by name, through a table of virtual functions, and never: all load at once, the first two throw."""
        source = made.csrc / "uses.cpp"
        source.write_text(
            "#include <cstring>\n#include <stdexcept>\n"
            "namespace tensorrt_llm { int absent(int); struct Runner { virtual int run(); virtual int other(); }; }\n"
            'extern "C" int asked(char *text) {\n'
            "  try { return tensorrt_llm::absent(3); }\n"
            "  catch (std::runtime_error &error) { std::strcpy(text, error.what()); return -1; } }\n"
            'extern "C" void *table() { static tensorrt_llm::Runner one; return &one; }\n'
        )
        library = flashinfer_module.link(made, [flashinfer_module.compile_one(made, source)])
        assert library.relative_to(made.out / "site") == Path(flashinfer_module.PLACE)
        loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
        text = ctypes.create_string_buffer(400)
        assert loaded.asked(text) == -1
        assert text.value.decode().startswith("not in this module")
        assert text.value.decode().endswith("absentEi")

    def test_an_object_is_made_again_when_its_source_changes(self, made: flashinfer_module.Kit) -> None:
        source = made.csrc / "one.cpp"
        source.write_text("int one() { return 1; }\n")
        first = flashinfer_module.compile_one(made, source)
        stamp = first.stat().st_mtime_ns
        assert flashinfer_module.compile_one(made, source) == first
        assert first.stat().st_mtime_ns == stamp
        source.write_text("int one() { return 2; }\n")
        assert flashinfer_module.compile_one(made, source) != first

    def test_a_source_that_does_not_compile_is_named(self, made: flashinfer_module.Kit) -> None:
        source = made.csrc / "broken.cpp"
        source.write_text("int one( {\n")
        with pytest.raises(RuntimeError, match=r"broken\.cpp was not compiled"):
            flashinfer_module.compile_one(made, source)

    def test_every_candidate_of_flashinfer_is_compiled(self) -> None:
        """One schedule for each of 29 tiles and 4 clusters; bf16 never takes 4 of the tiles, e4m3 has 10 more."""
        package = find_spec("flashinfer")
        if package is None or package.origin is None:
            pytest.skip("flashinfer is not installed")
        generate = flashinfer_module.generator(Path(package.origin).parents[1])
        kernels = {kind: flashinfer_module.wanted(generate, kind) for kind in ("bf16", "fp8")}
        assert {kind: len(found) for kind, found in kernels.items()} == {"bf16": 25 * 4, "fp8": 29 * 4 + 10}
        assert len({repr(one) for found in kernels.values() for one in found}) == 226

    def test_flags_are_those_of_flashinfer(self) -> None:
        """Of the release that is built; its own description of the module names them, and the sources."""
        flashinfer = pytest.importorskip("flashinfer")
        if flashinfer.__version__ != "0.7.2":
            pytest.skip(f"flashinfer is {flashinfer.__version__}")
        jit = pytest.importorskip("flashinfer.jit.fused_moe")
        spec = jit.gen_cutlass_fused_moe_sm90_module()
        assert [flag for flag in spec.extra_cuda_cflags if flag] == list(flashinfer_module.CUDA_FLAGS)
        assert [*spec.extra_cflags, "-fPIC"] == list(flashinfer_module.CXX_FLAGS)
        known = {str(path) for path in spec.sources}
        assert all(any(one.endswith(name) for one in known) for name in flashinfer_module.SOURCES)
        assert str(spec.aot_path).endswith(flashinfer_module.PLACE)
