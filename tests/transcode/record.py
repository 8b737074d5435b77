"""What the real libraries have read: `python tests/transcode/record.py`, where all of them are installed.

It runs test_libraries*.py, of which nothing may be skipped or fail, and writes `recorded.json`: the date, the versions
that were there, and per source and target one digest over config and tensors. Bytes that change later have not been in
the libraries' hands: test_recorded.py then asks for another run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import torch
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.transcode.transcode import transcode

RECORD = Path(__file__).with_name("recorded.json")
CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

#: Checkpoints of FP8, NVFP4 and MXFP8.
FLOATS = {
    "ct-fp8-block-qwen3moe",
    "ct-fp8-channel-qwen3moe",
    "ct-fp8-tensor-qwen3moe",
    "ct-mxfp8-qwen3moe",
    "ct-nvfp4-qwen3moe",
    "ct-nvfp4a16-qwen3moe",
    "modelopt-fp8-qwen3moe",
    "modelopt-nvfp4-qwen3moe",
}

#: Checkpoints of the record.
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())

#: Libraries that read them.
LIBRARIES = ("compressed-tensors", "transformers", "gptqmodel", "autoawq", "nvidia-modelopt", "vllm")

#: Targets that a library reads in these tests: made from integers and MXFP4, and made from `FLOATS`.
READ = ("compressed-tensors", "gptq", "gptq_v2", "mxfp4", "fp8", "nvfp4", "nvfp4-compressed-tensors")
READ_FROM_FLOATS = ("compressed-tensors", "modelopt", "nvfp4-compressed-tensors")

#: What none of these tests has a library read: vLLM 0.33.0's loader took such tables on the day they were added.
UNREAD = {("ct-fp8-block-qwen3moe", "modelopt")}


def digests(names: list[str], folder: Path) -> dict[str, str]:
    """`source -> target` to a digest, for what can be transcoded exactly."""
    found = {}
    for name in names:
        for target in READ_FROM_FLOATS if name in FLOATS else READ:
            if (name, target) in UNREAD:
                continue
            try:
                transcode(CHECKPOINTS / name, folder / name / target, target)
            except MoeqError:
                continue
            found[f"{name} -> {target}"] = digest(folder / name / target)
    return found


def digest(folder: Path) -> str:
    """SHA-256 over the quantisation config and every tensor: name, dtype, shape, bytes."""
    total = hashlib.sha256()
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    total.update(json.dumps({**table, "meta": None, "producer": None}, sort_keys=True).encode())
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run_tests(report: Path) -> int:
    """Run the tests with the libraries; how many passed. Raises SystemExit where any did not."""
    tests = map(str, sorted(Path(__file__).parent.glob("test_libraries*.py")))
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    code = subprocess.run([*command, "-p", "no:cacheprovider", f"--junitxml={report}"], check=False).returncode
    suite = ElementTree.parse(report).getroot()[0].attrib
    if code or int(suite["skipped"]):
        raise SystemExit(f"nothing is recorded: pytest ended with {code}, {suite['skipped']} tests were skipped")
    return int(suite["tests"])


def main() -> None:
    """Write the record."""
    with tempfile.TemporaryDirectory() as folder:
        passed = run_tests(Path(folder) / "report.xml")
        for name in NAMES:
            (Path(folder) / name).mkdir()
        rows = digests(NAMES, Path(folder))
    found = {name: version(name) for name in LIBRARIES}
    record = {"date": date.today().isoformat(), "passed": passed, "libraries": found, "digests": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
