"""Digests of what the real libraries have read: `python tests/transcode/record.py` after test_libraries.py has passed.

`recorded.json` names the versions that were there, and per source and target one digest over config and tensors. Bytes
that change later have not been in the libraries' hands: test_recorded.py then asks for another run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.transcode.targets import TARGETS
from moeq.transcode.transcode import transcode

RECORD = Path(__file__).with_name("recorded.json")
CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

#: Checkpoints whose transcodings have not been put before the libraries.
NOT_RECORDED = {
    "ct-fp8-block-qwen3moe",
    "ct-fp8-channel-qwen3moe",
    "ct-fp8-tensor-qwen3moe",
    "ct-mxfp8-qwen3moe",
    "ct-nvfp4-qwen3moe",
    "ct-nvfp4a16-qwen3moe",
}

#: Checkpoints of the record.
NAMES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir() and path.name not in NOT_RECORDED)

#: Targets that a library reads in test_libraries.py.
READ = ("compressed-tensors", "gptq", "gptq_v2", "mxfp4", "fp8", "nvfp4", "nvfp4-compressed-tensors")


def digests(names: list[str], folder: Path) -> dict[str, str]:
    """`source -> target` to a digest, for what can be transcoded exactly."""
    found = {}
    for name in names:
        for target in (target for target in TARGETS if target in READ):
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


def main() -> None:
    """Write the record."""
    libraries = {
        "compressed-tensors": "0.20.0",
        "transformers": version("transformers"),
        "gptqmodel": "7.7.0",
        "autoawq": "0.2.9",
        "vllm": "0.33.0",
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            (Path(folder) / name).mkdir()
        rows = digests(NAMES, Path(folder))
    RECORD.write_text(json.dumps({"libraries": libraries, "digests": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
