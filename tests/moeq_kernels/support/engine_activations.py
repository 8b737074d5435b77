"""Record what the engines' own formulas in plain torch give.

    python -m support.engine_activations VLLM_SITE SGLANG_SITE > tests/data/activations.json

Each formula is cut out of the unpacked wheel's source and run alone, so that no engine has to be installed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

#: Gate and up: small and large numbers, both sides of every limit, and zeros.
GATE = [
    -30.0,
    -8.0,
    -7.0,
    -2.5,
    -1.0,
    -0.3,
    -1e-3,
    0.0,
    1e-5,
    1e-3,
    0.2,
    0.26,
    0.7,
    1.0,
    2.0,
    4.0,
    6.9,
    7.1,
    20.0,
    90.0,
]
UP = [0.5, -0.01, 3.0, -7.5, 7.5, 1e-4, 2.0, 1.0, -30.0, 4.0, -0.2, 0.25, 1.5, -1.0, 60.0, 6.9, -6.9, 9.0, 0.3, -2.0]

VLLM = "vllm/model_executor/layers/activation.py"
SGLANG = "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py"
SGLANG_LAYERS = "sglang/srt/layers/activation.py"

Case = tuple[str, str, str, dict[str, Any], dict[str, float]]
#: Kernel name, file, function or class, its attributes or arguments, and the kernels' numbers.
CASES: list[Case] = [
    ("silu", VLLM, "SiluAndMul", {}, {}),
    ("silu", VLLM, "SiluAndMulWithClamp", {"swiglu_limit": 2.0, "alpha": 1.0, "beta": 0.0}, {"limit": 2.0}),
    ("gelu", VLLM, "GeluAndMul", {"approximate": "none"}, {}),
    ("gelu_tanh", VLLM, "GeluAndMul", {"approximate": "tanh"}, {}),
    ("swiglu_oai", VLLM, "SiluAndMulWithClamp", {"swiglu_limit": 7.0, "alpha": 1.702, "beta": 1.0}, {"limit": 7.0}),
    (
        "swiglu_oai",
        VLLM,
        "SiluAndMulWithClamp",
        {"swiglu_limit": 5.0, "alpha": 1.1, "beta": 0.5},
        {"limit": 5.0, "alpha": 1.1, "beta": 0.5},
    ),
    ("swiglu_step", VLLM, "SwigluStepAndMul", {"limit": 7.0}, {}),
    ("situ", VLLM, "SituAndMul", {"beta": 4.0, "linear_beta": None}, {"alpha": 4.0}),
    ("situ", VLLM, "SituAndMul", {"beta": 1.0, "linear_beta": 2.0}, {"alpha": 1.0, "limit": 2.0}),
    ("relu2_ungated", VLLM, "ReLUSquaredActivation", {}, {}),
    ("swiglu_step", SGLANG, "_swiglu_silu_clamp_mul", {"gemm1_limit": 3.0}, {"limit": 3.0}),
    (
        "swiglu_oai",
        SGLANG,
        "swiglu_no_interleaved_with_alpha_and_limit",
        {"gemm1_alpha": 1.702, "gemm1_limit": 7.0},
        {"limit": 7.0},
    ),
    ("situ", SGLANG_LAYERS, "SituAndMul", {"beta": 4.0, "linear_beta": 25.0}, {"alpha": 4.0, "limit": 25.0}),
    ("gelu_tanh", SGLANG_LAYERS, "GeluAndMul", {"approximate": "tanh"}, {}),
]


def formula(file: Path, name: str) -> tuple[Any, bool]:
    """Return a function of the file, or `forward_native` of a class, and whether it is a method."""
    tree = ast.parse(file.read_text())
    found = next(one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name)
    function = found
    if isinstance(found, ast.ClassDef):
        inner = [one for one in found.body if isinstance(one, ast.FunctionDef)]
        function = next(one for one in inner if one.name == "forward_native")
    assert isinstance(function, ast.FunctionDef)
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    function.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    names["current_platform"] = SimpleNamespace(is_rocm=lambda: False)
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    return names[function.name], isinstance(found, ast.ClassDef) and not static


def main(vllm: str, sglang: str) -> None:
    """Print the document."""
    rows = []
    both = torch.tensor([GATE + UP], dtype=torch.float32)
    for name, file, function, numbers, constants in CASES:
        call, method = formula(Path(vllm if file == VLLM else sglang) / file, function)
        x = both[:, : len(GATE)] if name.endswith("_ungated") else both
        found = call(SimpleNamespace(**numbers), x) if method else call(x, **numbers)
        source = f"{file}: {function}"
        rows.append({"activation": name, "source": source, "constants": constants, "values": found[0].tolist()})
    json.dump(
        {"versions": ["vllm 0.33.0", "sglang 0.5.23"], "gate": GATE, "up": UP, "rows": rows}, sys.stdout, indent=1
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
