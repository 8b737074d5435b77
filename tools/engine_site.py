"""Unpack the engine and the quantisers that tools/engines.txt names, for tests of moeq beside their own code.

    python tools/engine_site.py .engines          # then tests run with .engines/site in PYTHONPATH

Every package is installed without its dependencies; of vLLM (a wheel of 340 MB, most of it code for GPUs) and GPTQModel
(whose build compiles) only Python and JSON files are kept. The folder is made anew when engines.txt changes. Where
the package index does not answer, that is said and the exit code is 1: nothing passes without having run.
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
#: Packages that are unpacked instead of installed.
UNPACKED = ("vllm", "gptqmodel")
KEPT = (".py", ".json")

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


def requirements(text: str) -> list[str]:
    """Return the requirements of a file."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def kept(name: str) -> bool:
    """Say whether a file of an archive is unpacked: Python, JSON, and what names the package's version."""
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


def make(site: Path) -> None:
    """Fill an empty folder.

    Args:
        site: the folder; its parent holds archives meanwhile.

    Raises:
        PipFailed: a package cannot be had.
    """
    wanted = requirements(WANTED.read_text(encoding="utf-8"))
    apart = [one for one in wanted if one.partition("==")[0] in UNPACKED]
    pip("install", "--no-deps", "--target", str(site), *(one for one in wanted if one not in apart))
    for one in apart:
        with tempfile.TemporaryDirectory(dir=site.parent) as folder:
            pip("download", "--no-deps", "--no-build-isolation", "--dest", folder, one)
            (archive,) = Path(folder).iterdir()
            unpack(archive, site, one.partition("==")[0])


def main(folder: Path) -> int:
    """Make the folder unless it is there, complete and of today's list."""
    stamp, site = folder / "made-from", folder / "site"
    digest = hashlib.sha256(WANTED.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    site.mkdir(parents=True)
    sys.stdout.write(f"{site}: unpacking {', '.join(requirements(WANTED.read_text())[:4])} and what they import\n")
    sys.stdout.flush()
    try:
        make(site)
    except PipFailed as error:
        said = "the package index does not answer" if _NO_ANSWER in str(error) else "pip failed"
        sys.stderr.write(f"{error}\n{site}: {said}, so no test ran beside the engine's own code\n")
        return 1
    stamp.write_text(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
