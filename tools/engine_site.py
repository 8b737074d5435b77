"""Unpack the engines and the quantisers that tools/engines.txt names, for tests of moeq beside their own code.

    python tools/engine_site.py .engines      # makes .engines/engine, sglang and libraries beside it, for PYTHONPATH

Every package is installed without its dependencies; of vLLM (a wheel of 340 MB, most of it code for GPUs), SGLang,
FlashInfer and GPTQModel (whose build compiles) only Python, JSON and headers are kept. A folder is made anew when its
section of engines.txt changes. Where the package index does not answer, that is said and the exit code is 1: nothing
passes that has not run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

WANTED = Path(__file__).with_name("engines.txt")
#: Packages that are unpacked instead of installed, and their folders.
UNPACKED = {"vllm": "vllm", "sglang": "sglang", "flashinfer-python": "flashinfer", "gptqmodel": "gptqmodel"}
#: SGLang looks for the folders of its headers when it is imported.
KEPT = (".py", ".json", ".h", ".cuh")

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
#: What pip says of a package when no index answered; it says the same of a name that no index has.
_NO_ANSWER = "(from versions: none)"


class PipFailed(Exception):
    """A command of pip failed; the text is what it wrote."""


def pip(*words: str) -> None:
    """Run pip."""
    done = subprocess.run([*_PIP, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipFailed(done.stderr)


def requirements(text: str) -> dict[str, list[str]]:
    """Return the requirements of each section."""
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            found[line.strip("[]")] = section = []
        elif not line.startswith("#"):
            section.append(line)
    return found


def kept(name: str) -> bool:
    """Say whether a file of an archive is unpacked: Python, JSON, headers, and what names the package's version."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts
    return inside and (path.suffix in KEPT or path.parent.suffix == ".dist-info")


def unpack(archive: Path, site: Path, package: str) -> None:
    """Unpack a wheel, or the package's folder of a source archive.

    Args:
        archive: a file of pip's.
        site: folder that importing looks into.
        package: name of the package's folder.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if kept(name)])
        return
    with tarfile.open(archive) as source, tempfile.TemporaryDirectory(dir=site.parent) as folder:
        members = [one for one in source.getmembers() if one.isfile() and kept(one.name)]
        source.extractall(folder, members, filter="data")
        (found,) = Path(folder).glob(f"*/{package}")
        shutil.move(found, site / package)


def make(site: Path, wanted: list[str]) -> None:
    """Fill a folder with packages.

    Args:
        site: the folder; its parent holds archives meanwhile.
        wanted: requirements.

    Raises:
        PipFailed: a package cannot be had.
    """
    apart = [one for one in wanted if one.partition("==")[0] in UNPACKED]
    pip("install", "--no-deps", "--target", str(site), *(one for one in wanted if one not in apart))
    for one in apart:
        with tempfile.TemporaryDirectory(dir=site.parent) as folder:
            pip("download", "--no-deps", "--no-build-isolation", "--dest", folder, one)
            (archive,) = Path(folder).iterdir()
            unpack(archive, site, UNPACKED[one.partition("==")[0]])


def main(folder: Path) -> int:
    """Make the folders that are not there, complete and of today's list."""
    for name, wanted in requirements(WANTED.read_text(encoding="utf-8")).items():
        stamp = folder / name / "made-from"
        digest = hashlib.sha256(" ".join([*wanted, sys.version]).encode()).hexdigest()
        if stamp.is_file() and stamp.read_text() == digest:
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        sys.stdout.write(f"{folder / name}: {', '.join(wanted[:3])} and what they import\n")
        sys.stdout.flush()
        try:
            make(folder / name, wanted)
        except PipFailed as error:
            said = "the package index does not answer" if _NO_ANSWER in str(error) else "pip failed"
            sys.stderr.write(f"{error}\n{folder / name}: {said}, so no test ran beside the engine's own code\n")
            return 1
        stamp.write_text(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
