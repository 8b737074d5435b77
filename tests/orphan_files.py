"""Small checkpoints of formats that engines dropped, built from vectors that the libraries wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moeq.checkpoint.source import tensor_of

#: Linear layers of a model of two experts and one other module.
MODULES = [
    *(f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")),
    "model.layers.0.self_attn.o_proj",
]


def vectors(method: str) -> dict[str, dict[str, Any]]:
    """The vectors of a library, by name."""
    path = Path(__file__).parent / "data" / "formats" / f"{method}.json"
    return {vector["name"]: vector for vector in json.loads(path.read_text())["vectors"]}


def stored(table: dict[str, Any]) -> torch.Tensor:
    found = tensor_of(bytearray.fromhex(table["hex"]), table["dtype"], tuple(table["shape"]), "vector")
    return found.view(torch.float8_e8m0fnu) if table["dtype"] == "F8_E8M0" else found


def save(
    folder: Path,
    vector: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    quantisation: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
        "hidden_size": vector["k"],
        "moe_intermediate_size": vector["n"],
        "quantization_config": quantisation,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(vector: dict[str, Any], changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All linear layers with the parts of one square vector; None leaves a part out."""
    parts = {name: stored(table) for name, table in vector["parts"].items()} | changes
    return {f"{m}.{part}": tensor.clone() for m in MODULES for part, tensor in parts.items() if tensor is not None}


def write_bitsandbytes(folder: Path, vector: dict[str, Any], **changes: torch.Tensor | None) -> Path:
    """Write a checkpoint as transformers saves one with `BitsAndBytesConfig`."""
    table = {"quant_method": "bitsandbytes", "load_in_4bit": "int8" not in vector["name"]}
    return save(folder, vector, tensors_of(vector, changes), table)


def write_hqq(folder: Path, vector: dict[str, Any], **changes: torch.Tensor | None) -> Path:
    """Write a checkpoint as transformers 4 saves one with `HqqConfig`."""
    table = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {}}
    return save(folder, vector, tensors_of(vector, changes), table)


def write_torchao(folder: Path, vector: dict[str, Any], **changes: torch.Tensor | None) -> Path:
    """Write a checkpoint as transformers saves one with `TorchAoConfig`."""
    table = {"quant_method": "torchao", "quant_type": {"default": vector["config"]}}
    metadata = {f"{module}.weight": vector["metadata"] for module in MODULES}
    return save(folder, vector, tensors_of(vector, changes), table, metadata)


def write_torchao_stacks(folder: Path, vector: dict[str, Any]) -> Path:
    """Write the vector as both experts of transformers 5's stacked parameters: gate and up rows are the same."""
    tensors, metadata = {}, {}
    for parameter, copies in (("gate_up_proj", 2), ("down_proj", 1)):
        name = f"model.layers.0.mlp.experts.{parameter}"
        metadata[name] = vector["metadata"]
        for part, table in vector["parts"].items():
            # Scales of packed int4 have a column per row of the matrix.
            across = vector["name"].startswith("int4tensor") and not part.endswith("qdata")
            rows = torch.cat([stored(table)] * copies, dim=int(across))
            tensors[name.replace(parameter, f"_{parameter}{part.removeprefix('_weight')}")] = torch.stack([rows, rows])
    table = {"quant_method": "torchao", "quant_type": {"default": vector["config"]}}
    return save(folder, vector, tensors, table, metadata)


#: Builder of a checkpoint of one vector, by method.
WRITERS = {"bitsandbytes": write_bitsandbytes, "hqq": write_hqq, "torchao": write_torchao}
