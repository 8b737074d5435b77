"""What both engines ask the config of a converted checkpoint, without any engine: a small class is the source's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeq.engines.converted_config import ConvertedQuantization, layer_number, source_unread
from moeq.errors import MoeqError


class Inner:
    """Config of a source's method."""

    def __init__(self, original: dict[str, Any]) -> None:
        self.original = original
        self.weight_block_size = original.get("weight_block_size")

    def get_supported_act_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.half,)


class Config(ConvertedQuantization):
    """Config of an engine that reads every method but one."""

    @staticmethod
    def source_config(original: dict[str, Any]) -> Any:
        if original["quant_method"] == "hqq":
            raise source_unread("hqq", "The engine", ValueError("no such method"))
        return Inner(original)


def test_the_sources_own_config_answers_for_other_layers() -> None:
    original = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for document, converted in (({"quant_method": "moeq", "original": original}, True), (original, False)):
        config = Config.from_config(document)
        assert config.converted is converted
        assert config.inner.original == original
        assert config.inner.original is not original, "an engine's class may change what it is given"
        assert config.unread is None
        assert config.weight_block_size == [128, 128]
        assert config.get_supported_act_dtypes() == [torch.half]


def test_without_a_config_of_the_source_there_is_none() -> None:
    for original in (None, {}):
        config = Config.from_config({"quant_method": "moeq", "original": original})
        assert config.inner is None
        assert config.unread is None
        assert config.weight_block_size is None
        assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert config.get_name() == "moeq"
    assert config.get_config_filenames() == []


def test_a_method_that_the_engine_does_not_read_ends_a_converted_folder_at_once() -> None:
    """For a source convert's own reason comes first, so that the refusal is kept."""
    with pytest.raises(MoeqError, match="layers outside the experts are still hqq") as refused:
        Config.from_config({"quant_method": "moeq", "original": {"quant_method": "hqq"}})
    assert refused.value.code == "answer.no-backend"
    assert "The engine does not read them: no such method" in refused.value.message
    assert refused.value.hint == "moeq oracle SRC says what serves this checkpoint"
    config = Config.from_config({"quant_method": "hqq"})
    assert config.inner is None
    assert isinstance(config.unread, MoeqError)
    assert config.unread.message == refused.value.message


@pytest.mark.parametrize(
    ("prefix", "number"),
    [
        ("model.layers.12.mlp.experts", 12),
        ("model.layers.3.mlp.experts.5.w1", 3),
        ("mtp.layers.0.mlp.experts", None),
        ("lm_head", None),
        ("layers.7", None),
    ],
)
def test_numbers_of_layers(prefix: str, number: int | None) -> None:
    assert layer_number(prefix) == number
