"""How long `moeq inspect` takes on a checkpoint of a terabyte.

Writes the headers of a synthetic checkpoint (60 layers of 384 experts, real names and shapes) over sparse files, so
that a terabyte takes a few tens of megabytes on disk, then opens it in a fresh process and prints CPU time and peak
memory:

    python examples/bench/inspect_speed.py [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 60, 384, 7168, 4096
GROUP = 32

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


def expert_tensors(layer: int) -> Iterator[tuple[str, str, list[int], int]]:
    """`(name, dtype, shape, bytes)` of one layer's experts, compressed-tensors int4 as Kimi-K2 stores it."""
    sizes = {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    for expert in range(EXPERTS):
        for projection, (n, k) in sizes.items():
            prefix = f"language_model.model.layers.{layer}.mlp.experts.{expert}.{projection}"
            yield f"{prefix}.weight_packed", "I32", [n, k // 8], n * k // 2
            yield f"{prefix}.weight_scale", "BF16", [n, k // GROUP], n * k // GROUP * 2
            yield f"{prefix}.weight_shape", "I64", [2], 16


def write_shard(path: Path, layer: int) -> tuple[list[str], int]:
    """One shard: a real header over a file that is a hole. Returns its tensor names and bytes of data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = [*expert_tensors(layer)]
    tensors.append(
        (f"language_model.model.layers.{layer}.mlp.gate.weight", "BF16", [EXPERTS, HIDDEN], EXPERTS * HIDDEN * 2)
    )
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little"))
        stream.write(raw)
        stream.truncate(8 + len(raw) + offset)
    return [name for name, _, _, _ in tensors], offset


def write_checkpoint(folder: Path) -> None:
    """The whole synthetic checkpoint."""
    weights = {"num_bits": 4, "type": "int", "group_size": GROUP, "symmetric": True, "strategy": "group"}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {
            "model_type": "kimi_k2",
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INTERMEDIATE,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 8,
            "num_hidden_layers": LAYERS,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            },
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(LAYERS):
        file = f"model-{layer + 1:05d}-of-{LAYERS:06d}.safetensors"
        names, size = write_shard(folder / file, layer)
        weight_map |= dict.fromkeys(names, file)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(folder: Path) -> str:
    """Open the checkpoint in a fresh process; its report."""
    command = [sys.executable, "-c", MEASURE, str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "synthetic"
        write_checkpoint(folder)
        sys.stdout.write(measure(folder))


if __name__ == "__main__":
    main()
