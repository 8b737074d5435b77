"""How long `moeq inspect` takes on a checkpoint of a terabyte.

Writes the headers of a synthetic checkpoint (60 layers of 384 experts, real names and shapes) over sparse files, so
that a terabyte takes a few tens of megabytes on disk, then opens it in a fresh process and prints CPU time and peak
memory:

    python examples/bench/inspect_speed.py [FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import make_checkpoint

LAYERS = 60
#: Kimi-K2 with experts of twice the size: as many tensors, and a terabyte.
MODEL = replace(make_checkpoint.MODELS["kimi-k2"], intermediate=4096)

MEASURE = """
import pathlib, resource, sys
import moeq
checkpoint = moeq.open(sys.argv[1])
info = checkpoint.info
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = usage.ru_maxrss
status = pathlib.Path("/proc/self/status")
if status.exists():  # where there is one, it does not count what the parent process had before the fork
    peak = int(status.read_text().partition("VmHWM:")[2].split()[0])
print(f"{info.schemes[0].title}: {info.num_tensors:,} tensors, {(info.expert_bytes + info.other_bytes) / 1e12:.2f} TB")
print(f"CPU {usage.ru_utime + usage.ru_stime:.2f} s, peak memory {peak / 1024:.0f} MiB")
print("torch imported" if "torch" in sys.modules else "torch not imported")
"""


def write_checkpoint(folder: Path) -> None:
    """Write the synthetic checkpoint: a file per layer, holes for values."""
    size = make_checkpoint.Size(LAYERS, shard_bytes=20 << 30)
    make_checkpoint.write_checkpoint(folder, MODEL, "ct-int4", size, sparse=True)


def measure(folder: Path) -> str:
    """Open the checkpoint in a fresh process; its report."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the checkpoint is written (default: removed again)")
    given = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        folder = given or Path(scratch) / "synthetic"
        write_checkpoint(folder)
        sys.stdout.write(measure(folder))


if __name__ == "__main__":
    main()
