"""Whole deployments from one read of the source: what every rank gets, against matrices sliced by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.division import split_experts, split_intermediate
from moeq.pipeline.convert import convert
from moeq.prove.restore import restore
from moeq.prove.verify import verify

GPU = parse_gpu("A100")
PREFIX = "model.layers.0.mlp.experts"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    return found


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of int32 words along the last axis, low bits first."""
    shifts = torch.arange(32 // bits) * bits
    return ((words.to(torch.int64).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)


def gptq(source: dict[str, torch.Tensor], module: str, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, G] of a GPTQ module, read by hand."""
    return fields(source[f"{module}.qweight"].t(), bits), source[f"{module}.scales"].t().contiguous()


def rank_parts(result: dict[str, torch.Tensor], role: str, rank: int, expert: int) -> dict[str, torch.Tensor]:
    head, tail = f"{PREFIX}.{role}_", f".rank{rank}"
    return {
        name.removeprefix(head).removesuffix(tail): tensor[expert]
        for name, tensor in result.items()
        if name.startswith(head) and name.endswith(tail)
    }


def assert_packed(found: dict[str, torch.Tensor], layout: str, matrix: QuantizedMatrix) -> None:
    wanted = get_layout(layout).pack(matrix)
    assert found.keys() == wanted.keys()
    for part, tensor in wanted.items():
        assert found[part].dtype == tensor.dtype
        assert torch.equal(raw(found[part]), raw(tensor)), part


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def check_round_trip(source: Path, out: Path, tmp_path: Path) -> None:
    found = verify(out, source)
    assert found.ok, found.mismatches
    restore(out, tmp_path / "back")
    for path in source.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


class TestTensorParallel:
    def test_a_single_group_per_rank_is_packed_rank_by_rank(self, checkpoints, tmp_path) -> None:
        """int8 g64, I = 128, tp 2: each rank has one group of w2, which Marlin orders in another way than two."""
        source = checkpoints / "gptq-int8-g64-qwen3moe"
        convert(source, tmp_path / "out", Deployment(gpu=GPU, tp=2), layout="marlin-wna16/1", force_layout=True)
        entry = read_manifest(tmp_path / "out").layer(0)
        assert entry.sharding.written == "ranks"
        assert "from 128 on; a rank has 64" in entry.sharding.why
        assert [(rank.experts, rank.intermediate) for rank in entry.ranks] == [((0, 4), (0, 64)), ((0, 4), (64, 128))]

        files, result = tensors(source), tensors(tmp_path / "out")
        for expert in range(4):
            codes, scales = gptq(files, f"{PREFIX}.{expert}.down_proj", 8)
            pairs = [gptq(files, f"{PREFIX}.{expert}.{name}", 8) for name in ("gate_proj", "up_proj")]
            for rank in range(2):
                spec = MatrixSpec("w2", 256, 64, "int8", 64, "f16")
                part = slice(64 * rank, 64 * rank + 64)
                shard = QuantizedMatrix(spec, codes[:, part].contiguous(), scales[:, rank : rank + 1].contiguous())
                assert_packed(rank_parts(result, "w2", rank, expert), "marlin-wna16/1", shard)
                spec = MatrixSpec("w13", 128, 256, "int8", 64, "f16")
                rows = [torch.cat([pair[i][part] for pair in pairs]) for i in (0, 1)]
                assert_packed(rank_parts(result, "w13", rank, expert), "marlin-wna16/1", QuantizedMatrix(spec, *rows))
        check_round_trip(source, tmp_path / "out", tmp_path)

    def test_act_order_keeps_every_group_on_every_rank(self, checkpoints, tmp_path) -> None:
        source, layout = checkpoints / "gptq-int4-g32-actorder-qwen3moe", "marlin-act-order/1"
        convert(source, tmp_path / "out", Deployment(gpu=GPU, tp=2), layout=layout, force_layout=True)
        files, result = tensors(source), tensors(tmp_path / "out")
        for expert in range(4):
            module = f"{PREFIX}.{expert}.down_proj"
            codes, scales = gptq(files, module, 4)
            g_idx = files[f"{module}.g_idx"]
            for rank in range(2):
                part = slice(64 * rank, 64 * rank + 64)
                spec = MatrixSpec("w2", 256, 64, "int4", 32, "f16", act_order=True, all_groups=4)
                shard = QuantizedMatrix(spec, codes[:, part].contiguous(), scales, group_index=g_idx[part].contiguous())
                found = rank_parts(result, "w2", rank, expert)
                assert_packed(found, layout, shard)
                # Without any of moeq's code: columns sorted by group, ties in column order; all four groups' scales.
                order = sorted(range(64), key=lambda column: (int(g_idx[part][column]), column))
                assert found["permutation"].tolist() == order
                assert found["group_index"].tolist() == sorted(g_idx[part].tolist())
                assert sorted(found["scale"].flatten().tolist()) == sorted(scales.flatten().tolist())
        check_round_trip(source, tmp_path / "out", tmp_path)

    @pytest.mark.slow
    def test_zero_points_follow_their_groups(self, checkpoints, tmp_path) -> None:
        """AWQ g32, I = 128, tp 4: one group of 32 per rank, padded by a second group of zeros, zero points too."""
        source = checkpoints / "awq-int4-g32-qwen3moe"
        convert(source, tmp_path / "out", Deployment(gpu=GPU, tp=4), layout="marlin-wna16/1", force_layout=True)
        entry = read_manifest(tmp_path / "out").layer(0)
        assert entry.sharding.why == "32 intermediate features per rank are padded to 64"
        files, result = tensors(source), tensors(tmp_path / "out")
        columns = [0, 4, 1, 5, 2, 6, 3, 7]
        for expert in range(4):
            module = f"{PREFIX}.{expert}.down_proj"
            codes, zeros = (
                fields(files[f"{module}.{part}"], 4).reshape(-1, 32, 8)[..., columns].flatten(1).t()
                for part in ("qweight", "qzeros")
            )
            scales = files[f"{module}.scales"].t()
            for rank in range(4):
                padded = torch.zeros((256, 64), dtype=torch.uint8)
                padded[:, :32] = codes[:, 32 * rank : 32 * rank + 32]
                spec = MatrixSpec("w2", 256, 64, "int4", 32, "f16", symmetric=False)
                empty = torch.zeros((256, 1))
                scale = torch.cat([scales[:, rank : rank + 1], empty.half()], dim=1)
                zero = torch.cat([zeros[:, rank : rank + 1], empty], dim=1).to(torch.int16)
                shard = QuantizedMatrix(spec, padded, scale, zero)
                assert_packed(rank_parts(result, "w2", rank, expert), "marlin-wna16/1", shard)
        check_round_trip(source, tmp_path / "out", tmp_path)

    @pytest.mark.cover(every=4)
    @pytest.mark.parametrize(
        ("name", "layout", "tp"),
        [
            ("awq-int4-g32-qwen3moe", "marlin-wna16/1", 2),
            ("ct-int4-asym-g32-mixtral", "triton-wna16/1", 4),
            ("ct-w8a8-qwen3moe", "int8-w8a8/1", 8),
            ("ct-w8a8-qwen3moe", "marlin-wna16/1", 2),
            ("ct-int4-g128-qwen3moe", "marlin-wna16/1", 2),
            ("mxfp4-gptoss", "mxfp4-identity/1", 4),
        ],
    )
    def test_what_is_called_sliceable_slices_into_the_packing_of_each_rank(
        self, name, layout, tp, checkpoints, tmp_path
    ) -> None:
        """Zero points and one scale per channel included (the last two int4/int8 ones have a single group in w2)."""
        convert(checkpoints / name, tmp_path / "whole", Deployment(gpu=GPU, tp=tp), layout=layout, force_layout=True)
        entry = read_manifest(tmp_path / "whole").layer(0)
        assert entry.sharding.written == "unsharded"
        assert entry.sharding.why.startswith(f"sliceable for tp {tp}: ")
        source, result, packer = moeq.open(checkpoints / name), tensors(tmp_path / "whole"), get_layout(layout)
        size = 128 // tp
        for role in ("w13", "w2"):
            matrix = source.matrix(0, 1, role)
            stored = entry.matrices[role]
            parts = {part: result[tensor][1] for part, tensor in stored.tensors.items()}
            for rank in range(tp):
                part = slice(rank * size, (rank + 1) * size)
                shard = rows_of(matrix, part) if role == "w13" else columns_of(matrix, part)
                n = (part.start, part.stop) if role == "w13" else (0, 256)
                k = (0, 256) if role == "w13" else (part.start, part.stop)
                cut = packer.slice_parts(parts, stored.padded_spec, n=n, k=k)
                assert_packed(cut, layout, shard)

    @pytest.mark.slow
    def test_a_single_block_per_rank_stays_a_block(self, checkpoints, tmp_path) -> None:
        """MXFP4, I = 128, tp 4: 32 features per rank, padded to 128 in blocks of 32."""
        source = checkpoints / "ct-mxfp4-qwen3moe"
        convert(source, tmp_path / "out", Deployment(gpu=GPU, tp=4), layout="marlin-mxfp4/1", force_layout=True)
        result = tensors(tmp_path / "out")
        assert list(result[f"{PREFIX}.w2_scale.rank3"].shape) == [4, 4, 256]
        assert not result[f"{PREFIX}.w2_scale.rank3"][:, 1:].any()
        check_round_trip(source, tmp_path / "out", tmp_path)

    def test_the_bias_of_w2_is_on_the_first_rank_only(self, checkpoints, tmp_path) -> None:
        convert(
            checkpoints / "mxfp4-gptoss",
            tmp_path / "out",
            Deployment(gpu=GPU, tp=2),
            layout="marlin-mxfp4/1",
            force_layout=True,
        )
        result = tensors(tmp_path / "out")
        first, second = (result[f"{PREFIX}.w2_bias.rank{rank}"] for rank in range(2))
        assert first.any()
        assert not second.any()
        assert all(result[f"{PREFIX}.w13_bias.rank{rank}"].any() for rank in range(2))


def rows_of(matrix: QuantizedMatrix, part: slice) -> QuantizedMatrix:
    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        half = matrix.spec.n // 2
        return None if tensor is None else torch.cat([tensor[:half][part], tensor[half:][part]])

    spec = matrix.spec.with_sizes(n=2 * (part.stop - part.start))
    return QuantizedMatrix(spec, cut(matrix.codes), cut(matrix.scales), cut(matrix.zeros), bias=cut(matrix.bias))


def columns_of(matrix: QuantizedMatrix, part: slice) -> QuantizedMatrix:
    spec, size = matrix.spec, matrix.spec.group_size
    groups = slice(None) if spec.num_groups == 1 else slice(part.start // size, part.stop // size)
    zeros = None if matrix.zeros is None else matrix.zeros[:, groups].contiguous()
    cut = spec.with_sizes(k=part.stop - part.start)
    codes, scales = matrix.codes[:, part].contiguous(), matrix.scales[:, groups].contiguous()
    return QuantizedMatrix(cut, codes, scales, zeros, bias=matrix.bias)


class TestExpertParallel:
    def test_experts_of_an_unsharded_file_are_read_by_number(self, checkpoints, tmp_path) -> None:
        convert(
            checkpoints / "ct-w8a8-qwen3moe",
            tmp_path / "out",
            Deployment(gpu=GPU, ep=2),
            layout="int8-w8a8/1",
            force_layout=True,
        )
        entry = read_manifest(tmp_path / "out").layer(0)
        assert (entry.sharding.axis, entry.sharding.written, entry.ranks) == ("ep", "unsharded", ())

    def test_layouts_that_look_at_all_local_experts_are_packed_rank_by_rank(self, checkpoints, tmp_path) -> None:
        source = checkpoints / "gptq-int4-g32-qwen3moe"
        deployment = Deployment(gpu=GPU, ep=2)
        convert(
            source, tmp_path / "out", deployment, layout="marlin-wna16-int8act/1", force_layout=True, allow_lossy=True
        )
        entry = read_manifest(tmp_path / "out").layer(0)
        assert [rank.experts for rank in entry.ranks] == [(0, 2), (2, 4)]
        files, result = tensors(source), tensors(tmp_path / "out")
        for rank in range(2):
            largest = max(
                float(files[f"{PREFIX}.{expert}.{name}.scales"].max())
                for expert in (2 * rank, 2 * rank + 1)
                for name in ("gate_proj", "up_proj")
            )
            scale = result[f"{PREFIX}.w13_global_scale.rank{rank}"]
            assert scale.shape[0] == 2
            assert set(scale.flatten().tolist()) == {float(torch.tensor(largest) / 4096)}
        check_round_trip(source, tmp_path / "out", tmp_path)

    def test_uneven_counts_give_the_first_ranks_one_more(self) -> None:
        assert [part.size for part in split_experts("layer 0", 10, 4)] == [3, 3, 2, 2]

    def test_too_many_ranks(self, checkpoints, tmp_path) -> None:
        with pytest.raises(MoeqError, match="4 experts, too few for ep 8") as caught:
            convert(
                checkpoints / "ct-w8a8-qwen3moe",
                tmp_path / "out",
                Deployment(gpu=GPU, ep=8),
                layout="int8-w8a8/1",
                force_layout=True,
            )
        assert (caught.value.exit_code, caught.value.hint) == (ExitCode.USAGE, "ep=4 works")


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "layout", "tp", "message", "hint"),
        [
            ("gptq-int8-g64-qwen3moe", "marlin-wna16/1", 4, r"128 / 4 = 32 per rank cuts groups of 64", "tp=2"),
            ("ct-int4-asym-g32-mixtral", "triton-wna16/1", 8, r"cuts groups of 32 \(16 % 32 = 16\)", "tp=4"),
            ("ct-w8a8-qwen3moe", "int8-w8a8/1", 3, r"128 / 3 leaves a remainder of 2", "tp=2"),
            (
                "mxfp4-gptoss",
                "marlin-mxfp4/1",
                3,
                r"128 / 32 = 4 blocks leave the last of 3 ranks without work",
                "tp=2",
            ),
        ],
    )
    def test_cut_groups_are_refused_with_the_nearest_size(
        self, name, layout, tp, message, hint, checkpoints, tmp_path
    ) -> None:
        with pytest.raises(MoeqError, match=message) as caught:
            convert(checkpoints / name, tmp_path / "out", Deployment(gpu=GPU, tp=tp), layout=layout, force_layout=True)
        assert caught.value.exit_code == ExitCode.USAGE
        assert caught.value.hint.startswith(hint)
        assert list(tmp_path.iterdir()) == []


class TestUnevenBlocks:
    """gpt-oss gives ranks whole blocks of 32, the last rank fewer."""

    def test_the_sizes_of_gpt_oss(self) -> None:
        spec = MatrixSpec("w2", 2880, 2880, "e2m1", 32, "e8m0")
        assert [part.size for part in split_intermediate("layer 0", spec, 4, 32)] == [736, 736, 736, 672]
        assert [part.size for part in split_intermediate("layer 0", spec, 8, 32)] == [384] * 7 + [192]

    def test_from_file_to_file_and_back(self, tmp_path) -> None:
        source = gpt_oss(tmp_path / "source", experts=3, hidden=256, intermediate=160)
        convert(source, tmp_path / "out", Deployment(gpu=GPU, tp=2), layout="marlin-mxfp4/1", force_layout=True)
        entry = read_manifest(tmp_path / "out").layer(0)
        assert [rank.intermediate for rank in entry.ranks] == [(0, 96), (96, 160)]
        assert [rank.matrices["w2"].padded_k for rank in entry.ranks] == [128, 128]
        check_round_trip(source, tmp_path / "out", tmp_path)


def gpt_oss(folder: Path, experts: int, hidden: int, intermediate: int) -> Path:
    """A checkpoint of one layer in gpt-oss's form, random bytes."""
    generator = torch.Generator().manual_seed(5)

    def octets(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    def bias(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    rows = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    found = {"model.layers.0.mlp.router.weight": bias(experts, hidden)}
    for name, (n, k) in rows.items():
        found[f"{PREFIX}.{name}_blocks"] = octets(experts, n, k // 32, 16)
        found[f"{PREFIX}.{name}_scales"] = octets(experts, n, k // 32, low=110, high=130)
        found[f"{PREFIX}.{name}_bias"] = bias(experts, n)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors")
    return folder
