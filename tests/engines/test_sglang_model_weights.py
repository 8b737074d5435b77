"""Packed experts that SGLang's model classes never see: at the start, and in updates of weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.sglang_engine import config_of, experts_layer
from load.deployments import convert
from sglang.srt.runtime_context import get_flags, get_parallel
from torch import nn

import moeq
from moeq.engines.sglang import model_weights
from moeq.errors import MoeqError

INT4 = "ct-int4-g128-qwen3moe"


@pytest.fixture(scope="module")
def folder(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(checkpoints / INT4, tmp_path_factory.mktemp("weights") / "out", "marlin-wna16/1")


class TestModels:
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_class_is_chosen_as_without_quantisation(self, fails: bool) -> None:
        for asked, seen in (("moeq", None), ("fp8", "fp8")):
            config = SimpleNamespace(quantization=asked)

            def find(found: Any, seen: str | None = seen) -> str:
                assert found.quantization == seen
                if fails:
                    raise ValueError("no such class")
                return "class"

            if fails:
                with pytest.raises(ValueError, match="no such class"):
                    model_weights.find_class(find, config)
            else:
                assert model_weights.find_class(find, config) == "class"
            assert config.quantization == asked

    def test_experts_that_are_not_the_engines(self, folder: Path) -> None:
        """A rank of a pipeline may have none, and a draft model has the source's."""

        class Model(nn.Module):
            def load_weights(self, weights: Any) -> list[str]:
                return [name for name, _ in weights]

        def load(model: Any, weights: Any) -> Any:
            return model.load_weights(weights)

        given = [("a", torch.ones(1))]
        config = config_of(folder)
        model = Model()
        model.inner = nn.Module()
        model.inner.quant_config = config
        with pytest.raises(MoeqError, match="Model does not run its experts through SGLang's FusedMoE") as refused:
            model_weights.load_others(load, model, given)
        assert refused.value.code == "usage.unsupported-model"
        assert "load_weights" not in vars(model)
        get_flags().moe.in_speculative_scope = True
        try:
            assert model_weights.load_others(load, model, given) == ["a"]
        finally:
            get_flags().moe.in_speculative_scope = False
        wrapped = model.load_weights
        assert model_weights.load_others(load, model, given) == ["a"]
        assert model.load_weights is wrapped, "wrapped once"
        assert model.inner.quant_config is config
        plain = Model()
        assert model_weights.load_others(load, plain, given) == ["a"], "no config of moeq's"
        staged = Model()
        staged.quant_config = config
        with get_parallel().override(pp_size=2):
            assert model_weights.load_others(load, staged, given) == ["a"]

    def test_the_config_comes_back_after_an_error(self, folder: Path) -> None:
        class Model(nn.Module):
            def load_weights(self, weights: Any) -> None:
                assert self.quant_config.get_name() == "compressed_tensors"
                raise OSError("broken off")

        model = Model()
        model.experts = experts_layer(folder)
        model.quant_config = config = model.experts.quant_config
        with pytest.raises(OSError, match="broken off"):
            model_weights.load_others(lambda model, weights: model.load_weights(weights), model, [])
        assert model.quant_config is config


class TestUpdates:
    """The engine reads the folder again after an error, whatever it says."""

    @pytest.mark.parametrize(
        ("passes", "done", "told"),
        [
            (["whole"], True, False),
            (["whole"], False, True),
            (["broken"], False, False),
            (["broken", "whole"], False, True),
            (["whole", "broken"], False, False),
            ([], False, False),
        ],
    )
    def test_whether_the_folder_was_read_to_its_end(self, passes: list[str], done: bool, told: bool) -> None:
        def load(weights: Any) -> str:
            if "broken" in weights:
                raise OSError("Input/output error")
            return "loaded"

        def update(updater: Any, path: str, load_format: str) -> tuple[bool, str]:
            assert (updater, path, load_format) == ("updater", "folder", "auto")
            for weights in passes:
                with suppress(OSError):
                    assert model_weights._load_weights(nn.Module(), load, [weights]) == "loaded"
            return done, "said"

        found = model_weights.update_from_disk(update, "updater", "folder", "auto")
        more = "\nmoeq: the engine then read folder again to its end, and all weights are the new ones"
        assert found == (done, "said" + more * told)
        assert model_weights._reading.get() is None

    def test_refusals_are_answers(self) -> None:
        def refuse(*given: Any, **named: Any) -> Any:
            raise MoeqError("usage.reload", "not so", "rather so")

        def fails(*given: Any, **named: Any) -> Any:
            raise OSError("broken off")

        assert model_weights.update_from_disk(refuse, None, "folder") == (False, "not so")
        assert model_weights.update_from_tensor(refuse, None, []) == (False, "not so")
        for update in (model_weights.update_from_disk, model_weights.update_from_tensor):
            with pytest.raises(OSError, match="broken off"):
                update(fails, None, "folder")
        assert model_weights._reading.get() is None

    def test_tensors_in_kernel_form(self, folder: Path) -> None:
        """Packed experts take none; the rest of the model does."""
        model = nn.Module()
        model.experts, model.norm = experts_layer(folder), nn.LayerNorm(2)
        updater = SimpleNamespace(get_model=lambda: model)
        seen: list[Any] = []

        def update(*given: Any, **named: Any) -> tuple[bool, str]:
            seen.append((given, named))
            return True, "done"

        packed, plain = [("experts.w2_weight", torch.ones(1))], [("norm.weight", torch.ones(2))]
        done, said = model_weights.update_from_tensor(update, updater, plain + packed, "direct")
        assert not done
        assert said.startswith("moeq: experts.w2_weight holds packed experts")
        assert seen == []
        for tensors, load_format in ((plain, "direct"), (packed, None), (packed, "flattened_bucket")):
            found = model_weights.update_from_tensor(update, updater, tensors, load_format, flush=True)
            assert found == (True, "done")
            assert seen.pop() == ((updater, tensors, load_format), {"flush": True})

    def test_layers_that_run_get_the_folder_that_is_read(self, folder: Path, monkeypatch) -> None:
        """Before, their method fills them, and a model's class gets the other tensors."""
        made: list[tuple[str, bool]] = []

        def reload(layers: Any, path: str, *, from_path: bool) -> str:
            made.append((path, from_path))
            return "reload"

        monkeypatch.setattr(model_weights, "ExpertReload", reload)
        monkeypatch.setattr(model_weights, "divert", lambda weights, to: [*weights, to])
        model = nn.Module()
        model.experts, model.other = experts_layer(folder), experts_layer(folder)
        name = min(model.experts.quant_method.experts.names)
        given = [(name, torch.ones(1)), ("norm", torch.ones(1))]
        assert model_weights._load_weights(model, list, given) == given[1:]
        model.other.quant_method.info = "prepared"
        assert model_weights._load_weights(model, list, given) == [*given, "reload"]
        served = moeq.open(folder).source.name
        assert made == [(served, False)]

        def update(updater: Any, path: str) -> tuple[bool, str]:
            return True, str(len(model_weights._load_weights(model, list, given)))

        assert model_weights.update_from_disk(update, None, "elsewhere") == (True, "3")
        assert made[1:] == [("elsewhere", True)]
