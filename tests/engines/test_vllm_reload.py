"""New weights of experts in a running vLLM, by the engine's own layerwise reload."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import trainer_examples  # noqa: F401 - lets the next lines find the scripts
from engines.test_reload import faulty
from engines.test_vllm_models import NoAttention
from engines.vllm_engine import set_current_vllm_config
from load.deployments import convert
from update.updates import Experts

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.errors import MoeqError
from moeq.load import refill
from moeq.load.rank_reading import equals_stored

reload = pytest.importorskip("vllm.model_executor.model_loader.reload", reason="this vLLM has no layerwise reload")

from skyrl_sync import sync as skyrl_sync  # noqa: E402
from vllm_server import ModelRunner  # noqa: E402

CASES = {"ct-int4-g128-qwen3moe": "qwen3_moe", "ct-w8a8-qwen3moe": "qwen3_moe", "mxfp4-gptoss": "gpt_oss"}


class Running(ModelRunner):
    """A whole model of the engine with converted experts, filled and set up, and the engine's reloads of it."""

    def reload_folder(self, folder: Path, *, by_engine: bool = True) -> None:
        """`reload_weights` of the engine with `weights_path`, or with an iterator that reads it."""
        from safetensors.torch import load_file
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        config = self.vllm_config.model_config
        config.model = str(folder)
        if by_engine:
            self.reload(DefaultModelLoader(LoadConfig()).get_all_weights(config, self.model))
        else:
            tensors = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
            self.reload(tensors.items())

    def reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`reload_weights` of the engine with an iterator."""
        with set_current_vllm_config(self.vllm_config):
            reload.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(tensors)
            finally:
                reload.finalize_layerwise_reload(self.model, self.vllm_config.model_config)

    def parameters(self, layer: int) -> dict[str, Any]:
        return dict(self.experts[layer].named_parameters())


@pytest.fixture
def running(request, folders, gpu, monkeypatch, tmp_path):
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    module = import_module(f"vllm.model_executor.models.{CASES[request.param]}")
    monkeypatch.setattr(module, "Attention", NoAttention)
    try:
        yield request.param, Running(folders[request.param], tmp_path, kernels="auto")
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.mark.parametrize("running", CASES, indirect=True)
def test_experts_are_reloaded_in_place(running, folders, checkpoints) -> None:
    name, engine = running
    source = Experts.read(checkpoints / name)
    addresses = {key: one.data_ptr() for key, one in engine.parameters(0).items()}
    given: dict[str, torch.Tensor] = {}
    wanted = {layer: moeq.writable_layer(moeq.open(folders[name]), layer) for layer in (0, 1)}
    writer = moeq.Writer(wanted.values())
    for layer in (0, 1):
        names = {key: tensor for key, tensor in source.tensors.items() if f"layers.{layer}.mlp.experts" in key}
        others = [tensor for key, tensor in source.tensors.items() if f"layers.{1 - layer}.mlp.experts" in key]
        given |= dict(zip(names, others, strict=True))  # each layer gets the experts of the other one
        for expert in range(wanted[layer].num_experts):
            for projection in source.projections:
                writer.update(layer, expert, projection, source.parts(1 - layer, expert, projection))
    engine.reload(given.items())
    for layer in (0, 1):
        for role in ("w13", "w2"):
            for part, tensor in wanted[layer].tensors[role].items():
                served = engine.parameters(layer)[f"{role}_{part}"]
                assert torch.equal(served.data, tensor.to(served.dtype)), (layer, role, part)
    assert addresses == {key: one.data_ptr() for key, one in engine.parameters(0).items()}


@pytest.mark.parametrize("running", ["ct-int4-g128-qwen3moe"], indirect=True)
def test_bf16_experts_are_quantised_and_bad_ones_refused(running, folders) -> None:
    name, engine = running
    layer = moeq.writable_layer(moeq.open(folders[name]), 1)
    spec = layer.specs["w2"]
    weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moeq.Writer([layer]).update(1, 0, "down", weight)
    engine.reload({"model.layers.1.mlp.experts.0.down_proj.weight": weight}.items())
    assert torch.equal(engine.parameters(1)["w2_weight"].data, layer.tensors["w2"]["weight"])
    with pytest.raises(MoeqError) as caught:
        engine.reload({"model.layers.1.mlp.experts.0.down_proj.weight": weight[1:]}.items())
    assert caught.value.code == "usage.update-tensors"
    assert torch.equal(engine.parameters(1)["w2_weight"].data, layer.tensors["w2"]["weight"])


@pytest.mark.parametrize("running", ["ct-int4-g128-qwen3moe"], indirect=True)
@pytest.mark.parametrize("together", [True, False])
def test_trainers_call_load_weights_themselves(running, folders, together) -> None:
    """SkyRL and verl hand a list of tensors to the model's `load_weights`; OpenRLHF and TRL call it for each tensor.

    verl then has the engine process all weights, as after a start.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    name, engine = running
    layer = moeq.writable_layer(moeq.open(folders[name]), 1)
    spec, writer = layer.specs["w13"], moeq.Writer([layer])
    made = torch.Generator().manual_seed(0)
    weights = [
        (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight", torch.randn(shape, generator=made).bfloat16())
        for expert in range(layer.num_experts)
        for part, shape in (
            ("gate", (spec.n // 2, spec.k)),
            ("up", (spec.n // 2, spec.k)),
            ("down", (spec.k, spec.n // 2)),
        )
    ]
    weights.append(("model.norm.weight", torch.full((spec.k,), 2.0).bfloat16()))
    for key, weight in weights[:-1]:
        writer.update(1, int(key.split(".")[5]), key.split(".")[6].removesuffix("_proj"), weight)
    for one in [weights] if together else [[pair] for pair in weights]:
        engine.model.load_weights(weights=one)
    process_weights_after_loading(engine.model, engine.vllm_config.model_config, torch.device("cpu"))
    for role, parts in layer.tensors.items():
        for part, tensor in parts.items():
            assert torch.equal(engine.parameters(1)[f"{role}_{part}"].data, tensor), (role, part)
    assert bool((engine.model.model.norm.weight == 2).all())


@pytest.mark.parametrize("running", ["ct-int4-g128-qwen3moe"], indirect=True)
def test_skyrl_sends_chunks_between_the_beginning_and_the_end_of_one_reload(running, folders) -> None:
    """Chunks cut layers."""
    name, engine = running
    layers = [moeq.writable_layer(moeq.open(folders[name]), number) for number in (0, 1)]
    writer, made, weights = moeq.Writer(layers), torch.Generator().manual_seed(0), []
    for layer in layers:
        w13, w2 = layer.specs["w13"], layer.specs["w2"]
        for expert in range(layer.num_experts):
            for part, shape in (("gate", (w13.n // 2, w13.k)), ("up", (w13.n // 2, w13.k)), ("down", (w2.n, w2.k))):
                weight = torch.randn(shape, generator=made).bfloat16()
                writer.update(layer.layer, expert, part, weight)
                weights.append((f"model.layers.{layer.layer}.mlp.experts.{expert}.{part}_proj.weight", weight))
    weights.append(("model.norm.weight", torch.full((w13.k,), 2.0).bfloat16()))
    addresses = {key: one.data_ptr() for key, one in engine.parameters(1).items()}
    skyrl_sync(engine, weights)
    for layer in layers:
        for role, parts in layer.tensors.items():
            for part, tensor in parts.items():
                assert torch.equal(engine.parameters(layer.layer)[f"{role}_{part}"].data, tensor), (role, part)
    assert addresses == {key: one.data_ptr() for key, one in engine.parameters(1).items()}
    assert bool((engine.model.model.norm.weight == 2).all())


@pytest.mark.parametrize("by_engine", [True, False])
@pytest.mark.parametrize("running", CASES, indirect=True)
def test_a_converted_folder_is_reloaded(running, folders, by_engine, monkeypatch) -> None:
    """After a sleep of level 2 all weights are lost, and the engine reads its folder again."""
    name, engine = running
    before = {layer: {key: one.data.clone() for key, one in engine.parameters(layer).items()} for layer in (0, 1)}
    addresses = {key: one.data_ptr() for key, one in engine.parameters(0).items()}
    for layer in (0, 1):
        for one in engine.parameters(layer).values():
            one.data.view(torch.uint8).fill_(0xA5)
    compared: list[str] = []

    def compare(source: Any, name: str, tensor: torch.Tensor) -> bool:
        compared.append(name)
        return equals_stored(source, name, tensor)

    monkeypatch.setattr("moeq.engines.reload.equals_stored", compare)
    engine.reload_folder(folders[name], by_engine=by_engine)
    assert bool(compared) != by_engine, "what the engine itself reads from the folder is not read twice"
    for layer in (0, 1):
        for key, one in engine.parameters(layer).items():
            assert torch.equal(one.data.view(torch.uint8), before[layer][key].view(torch.uint8)), (layer, key)
    assert addresses == {key: one.data_ptr() for key, one in engine.parameters(0).items()}


@pytest.mark.parametrize("running", ["ct-int4-g128-qwen3moe"], indirect=True)
def test_folders_that_do_not_fit_are_refused_before_a_byte_is_written(running, folders, checkpoints, tmp_path) -> None:
    name, engine = running
    before = {key: one.data.clone() for key, one in engine.parameters(1).items()}
    other = convert(checkpoints / name, tmp_path / "other", "triton-wna16/1")
    with pytest.raises(MoeqError, match="in triton-wna16/1, but the served experts are packed in marlin") as no:
        engine.reload_folder(other)
    assert no.value.code == "usage.reload"
    engine.vllm_config.model_config.model = str(folders[name])
    foreign = {key: one.data for key, one in moeq.writable_layer(moeq.open(folders[name]), 1).tensors["w2"].items()}
    stacked = moeq.open(folders[name]).manifest.layer(1).matrices["w2"].tensors  # type: ignore[attr-defined]
    with pytest.raises(MoeqError, match="is not the tensor of"):
        engine.reload({stacked["weight"]: foreign["weight"] + 1}.items())
    with pytest.raises(MoeqError, match="come together"):
        engine.reload({stacked["weight"]: foreign["weight"]}.items())
    assert all(torch.equal(before[key], one.data) for key, one in engine.parameters(1).items())


@pytest.mark.parametrize("running", ["ct-int4-g128-qwen3moe"], indirect=True)
def test_a_folder_that_breaks_off_leaves_whole_experts_and_a_retry_completes(
    running, folders, checkpoints, tmp_path, monkeypatch
) -> None:
    """By the engine's own `reload_weights`, which does not tidy up after an error."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    name, engine = running
    source = Experts.read(checkpoints / name)
    changed = {
        key: tensor.flip(0).contiguous() for key, tensor in source.tensors.items() if not key.endswith("weight_shape")
    }
    source.tensors |= changed
    new = convert(
        source.save(tmp_path / "source"), tmp_path / "new", moeq.open(folders[name]).manifest.layers[0].layout
    )
    addresses = {key: one.data_ptr() for key, one in engine.parameters(1).items()}

    def run() -> None:
        with set_current_vllm_config(engine.vllm_config):
            reload_weights(engine.vllm_config, engine.model, None, str(new), True)

    before, wanted = ({n: moeq.load_tensors(one, n) for n in (0, 1)} for one in (folders[name], new))
    monkeypatch.setattr(refill, "SCRATCH_BYTES", 1)  # one expert at a time
    for number, told in ((6, "expert 0 of layer 0, old"), (25, "layer 0 and experts 0 to 1 of layer 1, old")):
        with monkeypatch.context() as context:
            faulty(context, number)
            with pytest.raises(MoeqError, match=f"new weights are in {told} ones in all other experts") as caught:
                run()
        assert caught.value.code == "source.unreadable"
    for layer, count in ((0, 4), (1, 2)):
        served = engine.experts[layer].quant_method.served(engine.experts[layer])
        for role in STACKED_ROLES:
            for part, tensor in served[role].items():
                assert torch.equal(tensor[:count], getattr(wanted[layer], role)[part][:count]), (layer, role, part)
                assert torch.equal(tensor[count:], getattr(before[layer], role)[part][count:]), (layer, role, part)
    run()
    for layer in (0, 1):
        for role in STACKED_ROLES:
            for part, tensor in getattr(wanted[layer], role).items():
                assert torch.equal(engine.parameters(layer)[f"{role}_{part}"].data, tensor), (layer, role, part)
    assert addresses == {key: one.data_ptr() for key, one in engine.parameters(1).items()}
    norm = source.tensors["model.norm.weight"]
    assert torch.equal(engine.model.model.norm.weight.data, norm.to(engine.model.model.norm.weight.dtype))
