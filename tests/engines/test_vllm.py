"""The vLLM plug-in inside vLLM's own Python packages, without a GPU and so without its CUDA kernels.

Everything here is the engine's: plug-in loading, config registry, layer classes, expert classes, kernel set-up, and
for the Triton layouts its kernels too, in Triton's interpreter. What is pretended, where it says so, is that a GPU is
there: the engine asks its platform before it takes an expert class.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_engine import BACKENDS, NAMES, config_of, engine, experts_layer, loaded_layer, vllm
from load.deployments import LAYOUTS, convert
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.plugins import load_general_plugins

import moeq
from moeq.engines.vllm import plugin
from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM_VERSIONS


def test_the_engine_finds_the_plug_in() -> None:
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    if "moeq" not in found:
        pytest.skip("moeq is not installed as a package here, only on the path")
    load_general_plugins()
    assert get_quantization_config("moeq").__module__ == "moeq.engines.vllm.config"


@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "ct-int4-asym-g32-mixtral"])
def test_the_engine_chooses_the_method_for_a_converted_folder(name, folders) -> None:
    """The engine's own way from a folder to a quantisation config, with all its override rules."""
    import cloudpickle
    from transformers import AutoModel
    from vllm.config import LoadConfig, ModelConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    model = ModelConfig(model=str(folders[name]), skip_tokenizer_init=True, dtype="bfloat16")
    assert model.quantization == "moeq"
    config = get_quant_config(model, LoadConfig())
    config.maybe_update_config(model.model, hf_config=model.hf_config, revision=model.revision)
    assert config.get_name() == "moeq"
    assert config.checkpoint.kind == "converted"
    # Models that the engine has no class of its own for are made by transformers, from the same config.
    with torch.device("meta"):
        AutoModel.from_config(model.hf_config)
    # The server starts its engine in another process and sends it the config; the engine sends it to its ranks.
    for dumps in (cloudpickle.dumps, pickle.dumps):
        assert pickle.loads(dumps(config)).checkpoint.kind == "converted"


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "actorder" not in name])
def test_other_layers_keep_the_method_of_the_source(name, checkpoints) -> None:
    original = json.loads((checkpoints / name / "config.json").read_text())["quantization_config"]
    config = get_quantization_config("moeq").from_config({"quant_method": "moeq", "original": original})
    assert type(config.inner) is get_quantization_config(original["quant_method"])


def test_layers_see_the_blocks_of_the_source() -> None:
    """The engine allows joined layers whose parts are no whole blocks, and else refuses to make them."""
    original = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = get_quantization_config("moeq").from_config({"quant_method": "moeq", "original": original})
    layer = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.quant_config, layer.output_partition_sizes = config, [192, 128]
    layer._maybe_allow_fp8_block_shape_mismatch()
    assert layer.allow_fp8_block_shape_mismatch


def test_a_part_of_the_model_without_quantised_tensors_stays_so(checkpoints, tmp_path) -> None:
    """Though no ignore list names it, as in Kimi-K2.5, where the engine asks for the source's class of config."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "ct-int4-g128-qwen3moe", source)
    tensors = load_file(path := source / "model.safetensors")
    save_file(tensors | {"vision_tower.encoder.wo.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}, path)
    config = config_of(convert(source, tmp_path / "out", "marlin-wna16/1"))
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    with engine():
        vision, text = (
            config.get_quant_method(layer, name) for name in ("vision_tower.encoder.wo", "model.layers.0.x")
        )
    assert isinstance(vision, UnquantizedLinearMethod)
    assert not isinstance(text, UnquantizedLinearMethod)


def test_attention_sees_the_scales_of_a_key_value_cache() -> None:
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    original = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
    document = {"quant_method": "moeq", "original": original | {"kv_cache_scheme": scheme}}
    assert get_quantization_config("moeq").from_config(document).kv_cache_scheme == scheme
    assert get_quantization_config("moeq").from_config({"quant_method": "moeq"}).kv_cache_scheme is None


@pytest.mark.parametrize("name", list(NAMES))
@pytest.mark.parametrize("where", [{}, {"tp": (1, 2)}, {"ep": (1, 2)}], ids=["whole", "tp", "ep"])
def test_parameters_hold_the_bytes_of_the_rank(name, where, folders, gpu) -> None:
    if "tp" in where and "g128" in name:
        pytest.skip("128 intermediate features are one group")
    folder = folders[name]
    if "tp" in where and "actorder" in name:
        with pytest.raises(MoeqError, match="cannot be cut for tp 2"):
            experts_layer(folder, **where)
        return
    if "tp" in where and name in ("ct-mxfp4-qwen3moe", "mxfp4-gptoss", "gptq-int8-g64-qwen3moe"):
        with pytest.raises(MoeqError, match="cannot be cut for tp 2"):
            experts_layer(folder, **where)
        return
    layer = loaded_layer(folder, **where)
    (tp_rank, tp_size), (ep_rank, ep_size) = where.get("tp", (0, 1)), where.get("ep", (0, 1))
    wanted = moeq.load_experts(folder, 1, tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size)
    for role, matrix in (("w13", wanted.w13), ("w2", wanted.w2)):
        assert torch.equal(getattr(layer, f"{role}_weight"), matrix.weight)
        scale = getattr(layer, f"{role}_scale")
        assert torch.equal(scale, matrix.scale.to(scale.dtype))
        for part in ("zero", "bias"):
            if getattr(matrix, part) is not None:
                assert torch.equal(getattr(layer, f"{role}_{part}"), getattr(matrix, part))


@pytest.mark.skipif("marlin-act-order/1" not in BACKENDS, reason="this version reads no act-order")
def test_a_product_of_one_group_has_no_order(checkpoints: Path, tmp_path: Path, gpu: None) -> None:
    """The engine's kernel refuses act-order there ("num_groups must be > 1"); its columns are as they were."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-actorder-qwen3moe", source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128  # of 256 and 128 columns
    (source / "config.json").write_text(json.dumps(config))
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("scales", "qzeros")) and ".experts." in name:
                tensors[name] = tensor[::4].contiguous()
            elif name.endswith("g_idx") and ".experts." in name:
                tensors[name] = tensor // 4
        save_file(tensors, path, metadata={"format": "pt"})
    folder = convert(source, tmp_path / "out", "marlin-act-order/1")
    experts = loaded_layer(folder, kernels="engine").quant_method.moe_kernel.fused_experts
    assert experts.w13_g_idx is not None
    assert experts.w2_g_idx is experts.w2_g_idx_sort_indices is None


def triton_takes_zero_points() -> bool:
    """The Triton experts of 0.27 and 0.28 say that they do not."""
    (kind,) = BACKENDS["triton-wna16/1"].classes()
    return bool(kind._supports_quant_scheme(quant_utils.kInt4StaticAsym, None))


@pytest.mark.parametrize("name", list(NAMES))
def test_the_engines_kernel_gets_the_loaded_tensors(name, folders, gpu) -> None:
    """No repacking and no second copy: the kernel's record points at the parameters."""
    if name == "ct-int4-asym-g32-mixtral" and not triton_takes_zero_points():
        with pytest.raises(MoeqError, match="does not support quantization scheme"):
            experts_layer(folders[name], kernels="engine")
        return
    layer = loaded_layer(folders[name])
    places = {parameter: tensor.data_ptr() for parameter, tensor in layer.named_parameters()}
    config = layer.quant_method.moe_kernel.fused_experts.quant_config
    assert config.w1_scale.data_ptr() == places["w13_scale"]
    assert config.w2_scale.data_ptr() == places["w2_scale"]
    if "w13_zero" in places:
        assert config.w1_zp.data_ptr() == places["w13_zero"]
    if "w13_bias" in places:
        assert config.w1_bias.data_ptr() == places["w13_bias"]
        assert config.w2_bias.data_ptr() == places["w2_bias"]
    if "w13_permutation" in places:
        experts = layer.quant_method.moe_kernel.fused_experts
        assert experts.w13_g_idx.data_ptr() == places["w13_group_index"]
        assert experts.w2_g_idx_sort_indices.data_ptr() == places["w2_permutation"]
    expected = {"marlin": "MarlinExperts", "triton": "TritonWNA16Experts", "int8": "TritonExperts"}
    kinds = [kind.__name__ for kind in type(layer.quant_method.moe_kernel.fused_experts).__mro__]
    assert expected[NAMES[name].partition("-")[0]] in kinds


def test_a_single_scale_for_each_channel_is_one_group_to_the_triton_kernels(checkpoints, tmp_path, gpu) -> None:
    """-1, which Marlin takes for it, would be a divisor there."""
    folder = convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", "triton-wna16/1")
    layer = loaded_layer(folder)
    config = layer.quant_method.get_fused_moe_quant_config(layer)
    assert config.block_shape == [0, 256]  # hidden 256, intermediate 128


TOP_K, BLOCK_M = 2, 16
BLOCKS = {"BLOCK_SIZE_M": BLOCK_M, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}


def aligned(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs sorted by expert, each expert's rounded up to whole blocks: what the engine's CUDA operator gives."""
    flat, order, blocks = ids.flatten(), [], []
    for expert in range(experts):
        pairs = torch.where(flat == expert)[0].tolist()
        pairs += [flat.numel()] * (-len(pairs) % BLOCK_M)
        order += pairs
        blocks += [expert] * (len(pairs) // BLOCK_M)
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (order, blocks, [len(order)]))  # type: ignore


@pytest.mark.parametrize("name", ["gptq-int4-g128-mixtral", "ct-int4-asym-g32-mixtral", "ct-w8a8-qwen3moe"])
@pytest.mark.parametrize("role", ["w13", "w2"])
def test_the_engines_own_triton_kernels_read_the_loaded_tensors(name, role, folders, checkpoints, gpu) -> None:
    """In Triton's interpreter, with fp16 activations (it gets bf16 products wrong)."""
    from vllm.model_executor.layers.fused_moe import fused_moe as kernels
    from vllm.triton_utils import HAS_TRITON, tl

    assert HAS_TRITON
    source = moeq.open(checkpoints / name)
    layer = loaded_layer(folders[name], dtype=torch.float16)
    weight, scale, zero = (getattr(layer, f"{role}_{part}", None) for part in ("weight", "scale", "zero"))
    spec = source.spec(1, role)
    x = torch.randn(5, spec.k, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    ids = torch.tensor([[0, 1], [3, 1], [2, 0], [1, 2], [3, 0]])
    out = torch.zeros(5, TOP_K, spec.n, dtype=torch.float16)
    blocks = aligned(ids, 4)
    if "w8a8" in name:
        steps = x.float().abs().amax(1, keepdim=True) / 127
        codes = (x.float() / steps).round().to(torch.int8)
        x = codes.float() * steps
        kernels.invoke_fused_moe_triton_kernel(
            codes, weight, out, steps, scale, None, *blocks, False, TOP_K, BLOCKS, tl.float16,
            use_fp8_w8a8=False, use_int8_w8a8=True, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=True,
        )  # fmt: skip
    else:
        kernels.invoke_fused_moe_wna16_triton_kernel(
            x, weight, out, scale, zero, None, *blocks, False, TOP_K, {**BLOCKS, "SPLIT_K": 1}, tl.float16,
            use_int8_w8a16=False, use_int4_w4a16=True, block_shape=[0, spec.group_size],
        )  # fmt: skip
    for token, slot in [(t, s) for t in range(5) for s in range(TOP_K)]:
        expert = int(ids[token, slot])
        names = ("gate", "up") if role == "w13" else ("down",)
        wanted = torch.cat([source.dequantize(1, expert, part) for part in names]) @ x[token].float()
        assert (out[token, slot].float() - wanted).norm() < 1e-3 * wanted.norm()


class TestRefusals:
    name = "gptq-int4-g32-qwen3moe"

    def refused(self, folder: Path, **options: Any) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            experts_layer(folder, **options)
        return caught.value

    def test_no_gpu(self, folders) -> None:
        error = self.refused(folders[self.name], kernels="engine")
        assert error.code == "answer.no-backend"
        assert "current device" in error.message

    def test_another_backend_was_asked_for(self, folders, gpu) -> None:
        error = self.refused(folders[self.name], moe_backend="triton")
        assert error.code == "usage.moe-backend"
        assert "--moe-backend marlin" in (error.hint or "")

    def test_a_dtype_that_the_bytes_are_not_for(self, folders, gpu) -> None:
        assert self.refused(folders["ct-mxfp4-qwen3moe"], dtype=torch.float16).code == "usage.dtype"

    def test_a_tensor_parallel_degree_that_cuts_tiles(self, folders, gpu) -> None:
        error = self.refused(folders[self.name], tp=(0, 4))
        assert error.code == "usage.tp"
        assert "--tp 4" in (error.hint or "")

    def test_eight_bit_activations_of_marlin(self, folders, gpu, monkeypatch) -> None:
        monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
        assert self.refused(folders[self.name]).code == "environment.marlin-input"

    def test_a_layout_for_another_engine(self, checkpoints, tmp_path, gpu) -> None:
        folder = convert(checkpoints / self.name, tmp_path / "out", "humming-wna16/1")
        error = self.refused(folder)
        assert error.code == "answer.no-backend"
        assert "humming-wna16/1" in error.message

    @pytest.mark.skipif("marlin-act-order/1" in BACKENDS, reason="this version reads act-order")
    def test_a_source_method_that_the_engine_refuses(self, checkpoints) -> None:
        source = checkpoints / "gptq-int4-g32-actorder-qwen3moe" / "config.json"
        original = json.loads(source.read_text())["quantization_config"]
        with pytest.raises(MoeqError, match="vLLM does not read them: GPTQ group activation ordering"):
            get_quantization_config("moeq").from_config({"quant_method": "moeq", "original": original})

    @pytest.mark.parametrize(
        ("name", "layout", "order"),
        [
            ("mxfp4-gptoss", "marlin-mxfp4/1", "interleaved"),
            ("ct-mxfp4-qwen3moe", "marlin-mxfp4-interleaved/1", "gate-up"),
        ],
    )
    def test_rows_in_an_order_that_the_activation_does_not_take(
        self, name, layout, order, checkpoints, tmp_path, gpu
    ) -> None:
        error = self.refused(convert(checkpoints / name, tmp_path / "out", layout), kernels="engine")
        assert error.code == "answer.no-backend"
        assert error.message.endswith(f"takes them {order}")
        right = ({"marlin-mxfp4/1", "marlin-mxfp4-interleaved/1"} - {layout}).pop()
        assert f"--layout {right}" in (error.hint or "")

    def test_another_version_of_the_engine(self, folders, monkeypatch) -> None:
        monkeypatch.setattr(vllm, "__version__", "0.34.1")
        plugin.register()
        with pytest.raises(MoeqError, match=r"vLLM 0\.34\.1") as caught:
            get_quantization_config("moeq").from_config({})
        assert f"pip install vllm=={VLLM_VERSIONS[0]}" in (caught.value.hint or "")
        monkeypatch.undo()
        plugin.register()

    def test_changed_files_are_not_loaded(self, folders, tmp_path, gpu) -> None:
        folder = tmp_path / "short"
        shutil.copytree(folders[self.name], folder)
        manifest = json.loads((folder / "moeq.json").read_text())
        manifest["layers"][1]["matrices"]["w13"]["padded_n"] = 512
        (folder / "moeq.json").write_text(json.dumps(manifest))
        assert self.refused(folder).code == "source.bad-manifest"
