"""Collects what a GPU machine without network needs for the peers and for serving, as archives small enough to carry.

    PYTHONPATH=kernels python -m bench.bundle --out FOLDER [--parts vllm,python,...] [--most 39]

An archive holds `site/` (for PYTHONPATH) and `lib/` (for LD_LIBRARY_PATH). Libraries keep the device code of one
architecture only. It prints sizes, and which archives go into one upload of at most so many MiB; `bundle.json` says
it again. On the machine:

    cd /tmp/peers && tar xf ARCHIVE ...
    export PYTHONPATH=/tmp/peers/site LD_LIBRARY_PATH=/tmp/peers/lib

Wheels come from the package index by pip, are for Python 3.12 on x86-64 Linux, and stay outside this repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from bench.bundle.fatbin import trimmed
from bench.bundle.parts import PARTS, Part

#: manylinux names that wheels of these packages have.
PLATFORMS = ("2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2014", "1", "2_12", "2010", "2_5")

#: The functions of cuBLAS that TurboMind imports. cuBLAS 13 has them with the same arguments.
CUBLAS = (
    "cublasCreate_v2", "cublasDestroy_v2", "cublasGemmEx", "cublasGetMathMode", "cublasSetStream_v2",
    "cublasSetWorkspace_v2",
)  # fmt: skip


def fetch(requirements: Iterable[str], folder: Path) -> list[Path]:
    """The wheels."""
    platforms = [f"--platform=manylinux{'' if name.isdigit() else '_'}{name}_x86_64" for name in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none", *platforms,
        "--dest", str(folder), *requirements,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def wanted(name: str, part: Part) -> bool:
    """Whether a file of a wheel belongs to the part."""
    return any(fnmatch(name, one) for one in part.keep) and not any(fnmatch(name, one) for one in part.drop)


def unpack(part: Part, wheels: Iterable[Path], folder: Path, architecture: int) -> None:
    """The part's files under `site` and `lib` of the folder, libraries without other GPUs' code."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if info.is_dir() or not wanted(info.filename, part):
                    continue
                library = any(fnmatch(info.filename, one) for one in part.libraries)
                place = folder / "lib" / Path(info.filename).name if library else folder / "site" / info.filename
                place.parent.mkdir(parents=True, exist_ok=True)
                data = archive.read(info)
                place.write_bytes(trimmed(data, architecture) if data[:4] == b"\x7fELF" else data)


def cublas_12(folder: Path) -> None:
    """`libcublas.so.12` that passes functions on to `libcublas.so.13`, and an empty `libcublasLt.so.12`."""
    lines = ["#include <dlfcn.h>", "static void *find(const char *name) {",
             '  static void *library; if (!library) library = dlopen("libcublas.so.13", RTLD_NOW);',
             "  return library ? dlsym(library, name) : 0; }"]  # fmt: skip
    for name in CUBLAS:
        # A jump with all arguments as they are, in registers and on the stack.
        lines += [
            f"static void *{name}_13; __attribute__((constructor)) static void find_{name}(void)"
            f' {{ {name}_13 = find("{name}"); }}',
            f'__asm__(".pushsection .text\\n.globl {name}\\n.type {name},@function\\n"'
            f' "{name}: endbr64\\njmp *{name}_13(%rip)\\n.popsection");',
        ]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch) / "cublas.c", Path(scratch) / "versions"
        source.write_text("\n".join(lines) + "\n")
        versions.write_text("libcublas.so.12 { global: cublas*; local: *; };\n")
        build = ["gcc", "-shared", "-fPIC", "-O1", "-fno-toplevel-reorder"]
        script = f"-Wl,--version-script={versions}"
        subprocess.run(
            [*build, source, "-o", folder / "libcublas.so.12", "-Wl,-soname,libcublas.so.12", script, "-ldl"],
            check=True,
        )
        (Path(scratch) / "empty.c").write_text("")
        subprocess.run(
            [*build, Path(scratch) / "empty.c", "-o", folder / "libcublasLt.so.12", "-Wl,-soname,libcublasLt.so.12"],
            check=True,
        )


def archive(name: str, part: Part, out: Path, architecture: int, preset: int) -> Path:
    """The part, packed."""
    target = out / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        folder, wheels = Path(scratch) / "files", Path(scratch) / "wheels"
        unpack(part, fetch(part.wheels, wheels), folder, architecture)
        if part.cublas:
            cublas_12(folder / "lib")
        with tarfile.open(target, "w:xz", preset=preset) as packed:
            for child in sorted(folder.iterdir()):
                packed.add(child, child.name)
        shutil.rmtree(wheels)
    return target


def uploads(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Names together in uploads of at most so many bytes: each into the first that has room.

    Raises:
        ValueError: one of them is larger than an upload.
    """
    found: list[list[str]] = []
    for name, size in sizes.items():
        if size > most:
            raise ValueError(f"{name} has {size / 2**20:.1f} MiB, more than an upload of {most / 2**20:.1f} MiB")
        fits = (one for one in found if sum(sizes[other] for other in one) + size <= most)
        room = next(fits, None)
        if room is None:
            found.append([name])
        else:
            room.append(name)
    yield from found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--most", type=float, default=39, help="MiB of an upload, the repository not counted")
    parser.add_argument("--architecture", type=int, default=90, help="whose device code to keep")
    parser.add_argument("--preset", type=int, default=6, help="of xz")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name in given.parts.split(","):
        sizes[name] = archive(name, PARTS[name], given.out, given.architecture, given.preset).stat().st_size
        print(f"{name:18s} {sizes[name] / 2**20:6.1f} MiB  {PARTS[name].about}", flush=True)
    calls = list(uploads(sizes, int(given.most * 2**20)))
    for number, names in enumerate(calls, 1):
        total = sum(sizes[name] for name in names) / 2**20
        print(f"upload {number}: {', '.join(names)} ({total:.1f} MiB)")
    found = {"architecture": given.architecture, "bytes": sizes, "uploads": calls}
    (given.out / "bundle.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
