"""Digests of conversions, to compare machines and versions of Python: `python tests/attacks/reproduce.py`.

Prints one JSON document: versions, and for each small checkpoint the digest of its conversion, done with one worker and
with several, in shards, and without numba.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from blake3 import blake3

ROOT = Path(__file__).parents[2]

#: Small checkpoints and how they are converted.
SOURCES = {
    "gptq-int4-g32-qwen3moe": ("--gpu", "a100"),
    "mxfp4-gptoss": ("--gpu", "b200", "--layout", "trtllm-mxfp4/1", "--tp", "2"),
}

#: A command line for an interpreter that acts as if numba were not there.
WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from moeq.cli.app import run
sys.exit(run(sys.argv[1:]))
"""
_WITH = "import sys; from moeq.cli.app import run; sys.exit(run(sys.argv[1:]))"


def digest_of(folder: Path) -> str:
    """Of names and bytes of all files; of the manifest, of what does not depend on where it was made."""
    digest = blake3()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if path.name == "moeq.json":
            manifest = json.loads(data)
            for place in (manifest["source"], manifest["model"]):
                place["name"] = Path(place["name"]).name
            del manifest["seal"]
            data = json.dumps(manifest, sort_keys=True).encode()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def main() -> int:
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in SOURCES.items():
            source = str(ROOT / "tests" / "data" / "checkpoints" / name)

            def convert(label: str, *more: str, program: str = _WITH) -> None:
                out = Path(scratch) / f"{name} {label}"  # noqa: B023 - called in this round
                words = ["convert", source, str(out), *options, "--quiet", *more]  # noqa: B023
                subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)
                if out.exists():
                    found.setdefault(name, {})[label] = digest_of(out)  # noqa: B023

            convert("1 worker", "--workers", "1")
            convert("4 workers", "--workers", "4")
            convert("without numba", program=WITHOUT_NUMBA)
            convert("2 shards", "--shard", "1/2")
            convert("2 shards", "--shard", "0/2")
            convert("2 shards")
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    document = {"schema": "moeq.reproduced/1", **versions}
    same = all(len(set(digests.values())) == 1 for digests in found.values())
    digests = {name: next(iter(values.values())) for name, values in found.items()}
    ways = sorted({label for values in found.values() for label in values})
    print(json.dumps({**document, "ways": ways, "same": same, "digests": digests if same else found}, indent=2))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
