"""Converted checkpoints in transformers itself: logits and greedy tokens of the dequantised source model."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.hub_server import OLDER, serving
from engines.transformers_models import auto, load, packing_config
from load.deployments import LAYOUTS, convert

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.engines.transformers_versions import check_version
from moeq.errors import MoeqError

IDS = torch.tensor([[1, 5, 9, 2, 33, 60, 17], [3, 3, 8, 21, 40, 7, 12]])


def nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 `[R, C]` to codes `[R, C, 8]`."""
    return torch.stack([(words >> (4 * place)) & 15 for place in order], dim=-1)


def gptq(parts: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """GPTQ v1: codes in 32-bit words along K, zero points stored minus one."""
    per, mask = 32 // bits, (1 << bits) - 1
    shifts = torch.arange(per) * bits
    codes = ((parts["qweight"][:, None, :] >> shifts[None, :, None]) & mask).flatten(0, 1)
    zeros = ((parts["qzeros"][:, :, None] >> shifts) & mask).flatten(1) + 1
    groups = parts["g_idx"].long()
    return ((codes - zeros[groups]).float() * parts["scales"].float()[groups]).T


def awq(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """AWQ gemm: codes in words along N, interleaved."""
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    codes, zeros = (nibbles(parts[name], order).flatten(1) for name in ("qweight", "qzeros"))
    size = codes.shape[0] // zeros.shape[0]
    return ((codes - zeros.repeat_interleave(size, 0)).float() * parts["scales"].float().repeat_interleave(size, 0)).T


def source_model(folder: Path) -> torch.nn.Module:
    """The model that the source means, all weights dequantised: attention by the lines above, experts by moeq."""
    checkpoint = moeq.open(folder)
    config = auto("AutoConfig").from_pretrained(folder)
    method, bits = config.quantization_config["quant_method"], config.quantization_config.get("bits")
    del config.quantization_config
    model = auto().from_config(config, dtype=torch.float32).eval()
    state: dict[str, torch.Tensor] = {}
    linears: dict[str, dict[str, torch.Tensor]] = {}
    for name in checkpoint.source.tensors:
        if name in checkpoint.source.expert_names:
            continue
        module, _, part = name.replace("block_sparse_moe", "mlp").rpartition(".")
        if part in ("qweight", "qzeros", "scales", "g_idx"):
            linears.setdefault(module, {})[part] = checkpoint.source.read(name)
        else:
            state[f"{module}.{part}"] = checkpoint.source.read(name)
    for module, parts in linears.items():
        state[f"{module}.weight"] = gptq(parts, bits) if method == "gptq" else awq(parts)
    for layer in checkpoint.info.moe_layers:
        state |= expert_weights(checkpoint, layer, config.model_type == "gpt_oss")
    model.load_state_dict(state)
    return model


def expert_weights(checkpoint: moeq.Checkpoint, layer: int, gpt_oss: bool) -> dict[str, torch.Tensor]:
    prefix, experts = f"model.layers.{layer}.mlp.experts", range(checkpoint.num_experts(layer))

    def stack(name: str) -> torch.Tensor:
        return torch.stack([checkpoint.dequantize(layer, expert, name) for expert in experts])

    def bias(name: str) -> torch.Tensor:
        return torch.stack([checkpoint.matrix(layer, expert, name).bias for expert in experts])

    gate, up, down = stack("gate"), stack("up"), stack("down")
    if not gpt_oss:
        return {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return {
        f"{prefix}.gate_up_proj": torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2),
        f"{prefix}.gate_up_proj_bias": torch.stack([bias("gate"), bias("up")], 2).flatten(1, 2),
        f"{prefix}.down_proj": down.transpose(1, 2),
        f"{prefix}.down_proj_bias": bias("down"),
    }


@pytest.mark.cover(every=10)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_source_is_packed_while_it_is_loaded(name, checkpoints) -> None:
    config = packing_config(checkpoints / name, prove_all=True)
    model, info = load(checkpoints / name, config=config, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    experts = [module for module in model.modules() if hasattr(module, "converted")]
    assert len(experts) == 2
    with torch.no_grad():
        found, wanted = model(IDS).logits, source_model(checkpoints / name)(IDS).logits
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_convert_refuses_is_refused_while_loading(checkpoints, tmp_path) -> None:
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    config["quantization_config"]["bits"] = 5
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoeqError):
        load(tmp_path / "broken", config=packing_config(tmp_path / "broken"))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_logits_and_greedy_tokens_are_those_of_the_source(name, converted, checkpoints) -> None:
    model, info = load(converted[name], dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    wanted = source_model(checkpoints / name)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-5)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS[:1], **greedy), wanted.generate(IDS[:1], **greedy))


def test_an_activation_that_engines_call_otherwise(checkpoints, tmp_path) -> None:
    """Gemma's config says gelu_pytorch_tanh, vLLM and the kernels gelu_tanh: it converts, and runs."""
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu_pytorch_tanh"}))
    moeq.convert(source, tmp_path / "out", Deployment(gpu=parse_gpu("H200"), backend="marlin"))
    model = load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, source_model(source)(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "mxfp4-gptoss"])
def test_the_kernels_give_the_same_logits(name, converted) -> None:
    """What a GPU runs, here in Triton's interpreter."""
    model = load(converted[name], dtype=torch.bfloat16)
    with torch.no_grad():
        reference = model(IDS[:1, :3]).logits.float()
        experts = [module.converted for module in model.modules() if hasattr(module, "converted")]
        assert len(experts) == 2
        for converted_experts in experts:
            assert type(converted_experts).__name__ == "ConvertedExperts"
            converted_experts.run_on = "kernels"
        kernels = model(IDS[:1, :3]).logits.float()
    assert (kernels - reference).norm() < 0.02 * reference.norm()


def in_kernels(folder: Path) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The model with its experts in the kernels, and the modules of those."""
    model = load(folder, dtype=torch.bfloat16)
    experts = [module for module in model.modules() if hasattr(module, "converted")]
    for module in experts:
        module.converted.run_on = "kernels"
    return model, experts


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(converted) -> None:
    """Experts do not break the compiler's graph; weights that have moved since are prepared anew outside of it."""
    model, experts = in_kernels(converted["gptq-int4-g32-qwen3moe"])
    with torch.no_grad():
        wanted = model(IDS[:1, :3]).logits
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        assert torch.equal(compiled(IDS[:1, :3]).logits, wanted)
        first = experts[0]
        first.w2_scale.data.zero_()
        same = first.converted._prepared
        first.w13_weight.data = first.w13_weight.data.clone()
        assert not torch.equal(model(IDS[:1, :3]).logits, wanted)
        assert first.converted._prepared is not same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_tensors_are_loaded_as_they_lie(dtype, converted) -> None:
    folder = converted["gptq-int4-g32-qwen3moe"]
    model, checkpoint = load(folder, dtype=dtype), moeq.open(folder)
    for name in checkpoint.manifest.layer(1).tensors:
        loaded = model.get_parameter(name)
        assert loaded.dtype == checkpoint.source.read(name).dtype
        assert torch.equal(loaded, checkpoint.source.read(name)), name
    assert model.lm_head.weight.dtype == dtype


def test_a_device_map_works(converted) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = load(converted["gptq-int4-g128-mixtral"], device_map="cpu")
    assert model(IDS).logits.shape == (2, 7, 64)


def held(model: torch.nn.Module) -> list[bool]:
    """Whether a layer's experts hold on to weights, beside their own parameters."""
    return [one.converted._prepared is not None for one in model.modules() if hasattr(one, "converted")]


@pytest.mark.slow
def test_weights_that_are_offloaded_are_not_held(converted) -> None:
    """accelerate puts them on the device for the time of a call: all layers' would be there otherwise."""
    accelerate = pytest.importorskip("accelerate", reason="offloading is accelerate's")
    model, experts = in_kernels(converted["gptq-int4-g32-qwen3moe"])
    with torch.no_grad():
        wanted = model(IDS[:1, :3]).logits
        assert held(model) == [True, True]
        assert held(copy.deepcopy(model)) == [False, False]
        for module in experts:
            module.converted.run_on = "reference"  # as on a CPU
        model(IDS[:1, :3])
        assert held(model) == [False, False]
        for module in experts:
            module.converted.run_on = "kernels"
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert torch.equal(model(IDS[:1, :3]).logits, wanted)
        assert held(model) == [False, False]
        assert {module.w13_weight.device.type for module in experts} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_router_takes_the_dtype_of_the_model(dtype, converted) -> None:
    """Mixtral's is renamed while it is loaded, and transformers before 5.21 then leaves it in the dtype of the file."""
    model = load(converted["ct-int4-asym-g32-mixtral"], dtype=dtype)
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers} == {dtype}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_on_a_gpu(name, checkpoints, tmp_path) -> None:
    """The whole model on the GPU in bf16, experts in the kernels, against the dequantised source in float32."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    major, minor = torch.cuda.get_device_capability()
    where = moeq.Deployment(gpu=moeq.gpu(f"sm{major}{minor}"))
    moeq.convert(checkpoints / name, tmp_path / "out", where, layout=LAYOUTS[name], force_layout=True)
    source = source_model(checkpoints / name)
    model = load(tmp_path / "out", dtype=torch.bfloat16, device_map="cuda")
    with torch.no_grad():
        wanted, found = source(IDS).logits, model(IDS.cuda()).logits.float().cpu()
        assert (found - wanted).norm() < 0.03 * wanted.norm()
        ids, seen = IDS[:1].cuda(), torch.ones(1, IDS.shape[1], device="cuda")  # no token is padding
        said = model.generate(ids, attention_mask=seen, max_new_tokens=6, do_sample=False).cpu()
        logits = source(said).logits[0]
    for place in range(IDS.shape[1], said.shape[1]):
        before = logits[place - 1]
        assert before.max() - before[said[0, place]] < 0.05 * (before.max() - before.mean())


class TestRefusals:
    name = "gptq-int4-g32-qwen3moe"

    def refused(self, folder: Path) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            load(folder)
        return caught.value

    def test_a_model_that_is_not_covered_is_named(self, converted, tmp_path) -> None:
        folder = tmp_path / "other"
        shutil.copytree(converted[self.name], folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        error = self.refused(folder)
        assert error.code == "usage.unsupported-model"
        assert "Qwen3ForCausalLM has no experts" in error.message

    def test_a_checkpoint_written_rank_by_rank(self, checkpoints, tmp_path) -> None:
        error = self.refused(convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", tp=2))
        assert error.code == "usage.tp"
        assert "--tp 1" in (error.hint or "")

    def test_a_model_spread_over_processes(self, converted) -> None:
        config = auto("AutoConfig").from_pretrained(converted[self.name])
        config.distributed_config = object()  # what `from_pretrained(tp_plan="auto")` leaves there
        with pytest.raises(MoeqError, match="split the model over processes"):
            load(converted[self.name], config=config)

    def test_no_manifest(self, converted, tmp_path) -> None:
        folder = tmp_path / "bare"
        shutil.copytree(converted[self.name], folder)
        (folder / "moeq.json").unlink()
        with pytest.raises((MoeqError, OSError), match=r"moeq\.json"):
            load(folder)

    def test_saving_would_lose_the_manifest(self, converted, tmp_path) -> None:
        model = load(converted[self.name])
        with pytest.raises(ValueError, match="moeq"):
            model.save_pretrained(tmp_path / "saved")

    def test_plain_weights_are_the_sources(self, converted) -> None:
        model = load(converted[self.name])
        with pytest.raises(MoeqError, match="not made plain weights again") as caught:
            model.dequantize()
        assert "moeq restore" in (caught.value.hint or "")


class TestVersions:
    """The installed version is read from the package's metadata, of which a folder in front holds another."""

    @pytest.fixture
    def pretend(self, tmp_path, monkeypatch):
        def install(version: str) -> None:
            info = tmp_path / f"transformers-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: transformers\nVersion: {version}\n")
            monkeypatch.syspath_prepend(tmp_path)

        return install

    @pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.0.0rc1"])
    def test_too_old_is_refused_by_the_import(self, version, pretend, monkeypatch) -> None:
        pretend(version)
        monkeypatch.delitem(sys.modules, "moeq.engines.transformers")
        with pytest.raises(MoeqError) as caught:
            importlib.import_module("moeq.engines.transformers")
        assert caught.value.code == "environment.engine-version"
        assert f"transformers {version}" in caught.value.message
        assert "transformers>=5.1" in (caught.value.hint or "")

    def test_missing_is_said(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        with pytest.raises(MoeqError, match="it is not installed here"):
            check_version()

    @pytest.mark.parametrize("version", ["5.1.0", "5.17.0", "5.24.0.dev0", "6.0.0"])
    def test_newer_is_not_refused(self, version, pretend) -> None:
        pretend(version)
        check_version()


LOAD = """
import json, sys
import moeq.engines.transformers
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained("org/converted", **json.loads(sys.argv[1]))).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"revision": OLDER}, {"cache_dir": "cache"}])
def test_a_repository_brings_its_manifest(options, converted, tmp_path: Path) -> None:
    """Of the commit that its other files are of, into the cache where they are."""
    options = {name: str(tmp_path / value) if name == "cache_dir" else value for name, value in options.items()}
    with serving() as hub:
        hub.add("org/converted", converted["gptq-int4-g32-qwen3moe"])
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", LOAD, json.dumps(options)]
        done = subprocess.run(command, env=inherited | ours | paths, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["Qwen3MoeForCausalLM"], done.stderr
