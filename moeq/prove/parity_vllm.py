"""Run vLLM's own packing of experts on a CPU: its functions, with logical matrices in its canonical form.

Marlin's repacking is a CUDA operation in vLLM. The Python packer that vLLM ships beside it (`marlin_utils_test.py`)
replaces it. Everything else is the code that runs when vLLM 0.33.0 loads a model.

Importing an engine loads its CUDA libraries. The few functions that move weights around are therefore taken out of the
installed source files and run in a namespace of their own. No code of the engine is part of moeq.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import StackedRole
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.schemes.awq import NIBBLE_OF_COLUMN, column_words
from moeq.schemes.bits import pack_nibbles, pack_stream, stream_codes

if TYPE_CHECKING:
    from torch import Tensor


_VERSION = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class EngineCode:
    """Source files of an engine."""

    root: Path  #: folder of the package (`.../vllm`)
    version: str  #: version of the package

    def load(self, file: str, names: Iterable[str], namespace: dict[str, Any]) -> None:
        """Define functions and constants of one file in a namespace, which has to hold everything that they use.

        Raises MoeqError `environment.engine-code` for a missing file or name.
        """
        path, wanted = self.root / file, set(names)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError) as error:
            raise self._missing(f"{path}: {error}") from None
        taken = [node for node in tree.body if _name(node) in wanted]
        missing = wanted - {_name(node) for node in taken}
        if missing:
            raise self._missing(f"{path} does not define {', '.join(sorted(missing))}")
        for node in taken:
            if isinstance(node, ast.FunctionDef):
                _strip(node)
        exec(compile(ast.Module(taken, []), str(path), "exec"), namespace)

    def _missing(self, detail: str) -> MoeqError:
        return MoeqError(
            "environment.engine-code", f"vLLM {self.version}: {detail}", "parity knows the files of vLLM 0.33.0"
        )


def find_engine(site: Path | None = None) -> EngineCode:
    """Find vLLM's source files below `site`, or where Python finds the package.

    Raises MoeqError `environment.no-engine`, with what to install.
    """
    if site is not None:
        root: Path | None = site / "vllm"
    else:
        spec = importlib.util.find_spec("vllm")
        root = Path(spec.origin).parent if spec is not None and spec.origin else None
    if root is None or not (root / "model_executor").is_dir():
        where = "is not installed here" if site is None else f"is not below {site}"
        raise MoeqError(
            "environment.no-engine",
            f"vLLM {where}; parity compares with the engine's own code",
            "pip install vllm==0.33.0, or without its dependencies: pip download --no-deps vllm==0.33.0, unpack the "
            "wheel (it is a zip file), and name that folder with --site",
        )
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = _VERSION.search(text)
    return EngineCode(root, found[1] if found else "of unknown version")


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _strip(function: ast.FunctionDef) -> None:
    """Drop decorators and annotations, which name classes that are not loaded and have no effect here."""
    function.decorator_list = []
    function.returns = None
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None


_UTILS = "model_executor/layers/quantization/utils"
_WNA16 = "model_executor/layers/fused_moe/oracle/int_wna16.py"

#: Function that gives one part of an expert's matrix; None if the matrix has none.
Part = Callable[[QuantizedMatrix], "Tensor | None"]

#: Tensors `[E, ...]` of each stacked matrix by part.
Packed = dict[StackedRole, dict[str, "Tensor"]]


@dataclass(frozen=True)
class ParityExperts:
    """Some experts of one rank, as input of the engine's packing."""

    w13: Sequence[QuantizedMatrix]  #: w13 of every expert, without padding
    w2: Sequence[QuantizedMatrix]  #: w2 of every expert, without padding
    padded: dict[StackedRole, Sequence[QuantizedMatrix]]  #: w13 and w2 with moeq's padding
    awq: bool  #: whether the checkpoint is in AWQ's format, which has a conversion of its own
    group_size: int  #: group size as the config declares it; -1 for one scale per channel
    interleaved: bool = False  #: whether gate and up rows are interleaved, as in gpt-oss


def marlin_wna16(engine: EngineCode, experts: ParityExperts) -> Packed:
    """Return what vLLM's `_process_weights_marlin` packs, or for AWQ `_process_awq_weights_marlin`."""
    namespace = _marlin(engine)
    engine.load(
        _WNA16,
        ["_pad_w13_shard_cols", "_pad_rows", "_pad_w13_bias", "_process_weights_marlin", "_process_awq_weights_marlin"],
        namespace,
    )
    spec = experts.w2[0].spec
    layer = SimpleNamespace(
        intermediate_size_per_partition=spec.k,
        num_groups_w13=experts.w13[0].spec.num_groups,
        num_groups_w2=spec.num_groups,
    )
    bits, per_word = spec.bits, 32 // spec.bits
    parts: list[Part]
    matrices = experts.w13, experts.w2
    if experts.awq:
        parts = [_awq_words, lambda m: m.scales.t().contiguous(), _awq_zeros, lambda m: m.bias]
        head: tuple[Any, ...] = (layer, bits, per_word, experts.group_size, None)
        run = namespace["_process_awq_weights_marlin"]
    else:
        parts = [_row_words, lambda m: m.scales.contiguous(), _packed_zeros, lambda m: m.bias]
        head = (layer, None, bits, per_word, experts.group_size)
        run = namespace["_process_weights_marlin"]
    w13, w2, s13, s2, z13, z2, _, _, b13, b2 = run(*head, *(_stack(rows, part) for part in parts for rows in matrices))
    return {"w13": _parts(w13, s13, z13, b13), "w2": _parts(w2, s2, z2, b2)}


def marlin_mxfp4(engine: EngineCode, experts: ParityExperts) -> Packed:
    """Return what vLLM's `prepare_moe_mxfp4_layer_for_marlin` packs of bf16 layers.

    The experts are padded before the call, since vLLM pads them while it loads.
    """
    import torch

    from moeq.model.stored_parts import interleaved

    namespace = _marlin(engine)
    namespace["get_marlin_input_dtype"] = lambda prefix=None: None
    names = ["mxfp4_marlin_process_scales", "_repack_marlin_experts", "prepare_moe_mxfp4_layer_for_marlin"]
    engine.load(f"{_UTILS}/marlin_utils_fp4.py", names, namespace)
    w13 = [interleaved(m) if experts.interleaved else m for m in experts.padded["w13"]]
    matrices = (w13, experts.padded["w2"])
    parts: list[Part] = [lambda m: pack_nibbles(m.codes), lambda m: m.scales.contiguous(), lambda m: m.bias]
    layer = SimpleNamespace(params_dtype=torch.bfloat16)
    w13_words, w2_words, s13, s2, b13, b2 = namespace["prepare_moe_mxfp4_layer_for_marlin"](
        layer, *(_stack(rows, part) for part in parts for rows in matrices)
    )
    return {"w13": _parts(w13_words, s13, None, b13), "w2": _parts(w2_words, s2, None, b2)}


#: Layout id to the engine's packing of it.
PACKERS: dict[str, Callable[[EngineCode, ParityExperts], Packed]] = {
    "marlin-wna16/1": marlin_wna16,
    "marlin-mxfp4/1": marlin_mxfp4,
    "marlin-mxfp4-interleaved/1": marlin_mxfp4,
}


def _marlin(engine: EngineCode) -> dict[str, Any]:
    """Make a namespace with vLLM's Marlin helpers, its Python packer in the place of the CUDA one."""
    import numpy
    import torch

    namespace: dict[str, Any] = {
        "np": numpy,
        "numpy": numpy,
        "torch": torch,
        "math": math,
        "round_up": lambda size, multiple: -(-size // multiple) * multiple,
        "logger": SimpleNamespace(warning_once=_silent, info_once=_silent, warning=_silent, info=_silent),
    }
    engine.load(f"{_UTILS}/quant_utils.py", ["get_pack_factor", "pack_cols", "unpack_cols"], namespace)
    names = [
        "GPTQ_MARLIN_TILE",
        "get_scale_perms",
        "marlin_permute_scales",
        "marlin_permute_bias",
        "marlin_zero_points",
        "awq_to_marlin_zero_points",
        "moe_awq_to_marlin_zero_points",
        "moe_packed_to_marlin_zero_points",
        "marlin_act_int8_process_scales",
        "marlin_moe_permute_scales",
        "marlin_padded_nk",
        "marlin_moe_padded_intermediate",
    ]
    engine.load(f"{_UTILS}/marlin_utils.py", names, namespace)
    names = ["marlin_permute_weights", "marlin_weights", "get_weight_perm"]
    engine.load(f"{_UTILS}/marlin_utils_test.py", names, namespace)
    namespace["ops"] = _Operations(namespace)
    return namespace


def _silent(*words: object, **options: object) -> None:
    """Replace the engine's log."""


class _Operations:
    """Replacement of vLLM's CUDA operations: it decodes the checkpoint's words and calls vLLM's Python packer."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def gptq_marlin_repack(
        self, b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> Tensor:
        """Pack one expert from words along K `[K / per word, N]`."""
        return self._pack(stream_codes(b_q_weight.t(), num_bits, size_k).t(), num_bits)

    def gptq_marlin_moe_repack(
        self, b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> Tensor:
        """Pack several experts from words along K."""
        import torch

        return torch.stack([self.gptq_marlin_repack(words, size_k, size_n, num_bits) for words in b_q_weight])

    def awq_marlin_moe_repack(
        self, b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> Tensor:
        """Pack several experts from words along N in AWQ's order `[K, N / per word]`."""
        import torch

        def codes(words: Tensor) -> Tensor:
            found = stream_codes(words, num_bits, size_n)
            return found.reshape(size_k, -1, 8)[..., list(NIBBLE_OF_COLUMN)].reshape(size_k, size_n)

        return torch.stack([self._pack(codes(words), num_bits) for words in b_q_weight])

    def _pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes `[K, N]` into int32 `[K / 16, N * bits / 2]`."""
        rows, columns = codes.shape
        order = self._namespace["get_weight_perm"](bits, False)
        packed: Tensor = self._namespace["marlin_weights"](codes.contiguous().long(), rows, columns, bits, order)
        return packed


def _stack(matrices: Sequence[QuantizedMatrix], part: Part) -> Tensor | None:
    import torch

    found = [part(matrix) for matrix in matrices]
    present = [tensor for tensor in found if tensor is not None]
    return torch.stack(present) if present else None


def _row_words(matrix: QuantizedMatrix) -> Tensor:
    """Pack codes into int32 `[N, K / per word]`, vLLM's canonical form of every format but AWQ."""
    return pack_stream(matrix.codes.contiguous(), matrix.spec.bits, matrix.spec.k * matrix.spec.bits // 32)


def _packed_zeros(matrix: QuantizedMatrix) -> Tensor | None:
    """Pack zero points into int32 `[N / per word, G]`."""
    import torch

    if matrix.zeros is None:
        return None
    columns = matrix.zeros.t().to(torch.uint8).contiguous()
    return pack_stream(columns, matrix.spec.bits, matrix.spec.n * matrix.spec.bits // 32).t().contiguous()


def _awq_words(matrix: QuantizedMatrix) -> Tensor:
    return column_words(matrix.codes.t().contiguous(), matrix.spec.bits, matrix.spec.n * matrix.spec.bits // 32)


def _awq_zeros(matrix: QuantizedMatrix) -> Tensor:
    import torch

    spec = matrix.spec
    zeros = matrix.zeros
    fields = (
        torch.full((spec.num_groups, spec.n), spec.symmetric_zero, dtype=torch.uint8)
        if zeros is None
        else zeros.t().to(torch.uint8).contiguous()
    )
    return column_words(fields, spec.bits, spec.n * spec.bits // 32)


def _parts(weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    named = {"weight": weight, "scale": scale, "zero": zero, "bias": bias}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
