"""Deployment options: given, in a file, or derived."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.deploy.options import make_deployment
from moeq.errors import MoeqError


def test_defaults() -> None:
    made = make_deployment({"gpu": "H100"})
    assert made == Deployment(parse_gpu("H100"))
    switches = {"batched": False, "lora": False, "eplb": False, "redundant_experts": 0, "env": (), "packages": ()}
    names = {"all2all": None, "dtype": "bf16", "backend": "auto", "engine": "vllm@0.33.0", "quantization": None}
    ranks = dict.fromkeys(("tp", "ep", "dp", "pcp"), 1)
    assert asdict(made) == {"gpu": asdict(parse_gpu("H100")), **ranks, **switches, **names}


@pytest.mark.parametrize(("gpu", "dtype"), [("V100", "fp16"), ("T4", "fp16"), ("A100", "bf16"), ("MI250X", "bf16")])
def test_dtype_follows_the_hardware(gpu: str, dtype: str) -> None:
    assert make_deployment({"gpu": gpu}).dtype == dtype
    assert make_deployment({"gpu": gpu, "dtype": "bfloat16"}).dtype == "bf16"


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('gpu = "MI300X"\ntp = 4\nlora = true\n[env]\nVLLM_ROCM_USE_AITER = 1\n', encoding="utf-8")
    made = make_deployment({"tp": 2, "ep": None}, file)
    assert (made.gpu.name, made.tp, made.ep, made.lora) == ("MI300X", 2, 1, True)
    assert made.env == (("VLLM_ROCM_USE_AITER", "1"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"tp = [", "is not TOML"),
        (b"gpu = '\xff'", "is not TOML"),
        (b"speed = 3\nbits = 4\n", "unknown keys bits, speed"),
        (None, "No such file"),
    ],
)
def test_bad_files(tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "d.toml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(MoeqError, match=message) as raised:
        make_deployment({"gpu": "H100"}, file)
    assert raised.value.code == "usage.deploy-file"
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": 0}, "tp is 0, it has to be an integer of at least 1"),
        ({"redundant_experts": -1}, "redundant_experts is -1, it has to be an integer of at least 0"),
        ({"dtype": "int4"}, "dtype 'int4' is not known"),
        ({"lora": "no"}, "lora is 'no', it has to be true or false"),
        ({"batched": 1}, "batched is 1, it has to be true or false"),
        ({"engine": 3}, "engine is 3, it has to be text"),
        ({"backend": 1.5}, "backend is 1.5, it has to be text"),
        ({"env": "A"}, "env is 'A', it has to be a table"),
        ({"packages": ["deep_gemm"]}, r"packages is \['deep_gemm'\], it has to be a table"),
    ],
)
def test_values_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(MoeqError, match=f"^{message}") as raised:
        make_deployment({"gpu": "H100", **wrong})
    assert raised.value.code == "usage.deployment"


def test_a_deployment_has_no_other_dtype() -> None:
    with pytest.raises(MoeqError, match="dtype is 'half', it has to be bf16 or fp16"):
        Deployment(parse_gpu("H100"), dtype="half")  # type: ignore[arg-type]


def test_redundant_experts_may_be_none() -> None:
    assert make_deployment({"gpu": "H100", "redundant_experts": 0}).redundant_experts == 0


@pytest.mark.parametrize("name", ["tp", "ep", "dp", "pcp"])
@pytest.mark.parametrize("value", [0, -1, True, "2", 1.5])
def test_counts_of_a_deployment(name: str, value: Any) -> None:
    with pytest.raises(MoeqError, match=f"{name} is {value!r}, it has to be an integer of at least 1"):
        Deployment(parse_gpu("H100"), **{name: value})
    assert getattr(Deployment(parse_gpu("H100"), **{name: 3}), name) == 3


def test_a_gpu_that_is_one() -> None:
    gpu = parse_gpu("H100")
    assert make_deployment({"gpu": gpu}, detect=False).gpu is gpu
    with pytest.raises(MoeqError, match="has to be a Gpu"):
        Deployment("H100")  # type: ignore[arg-type]


def test_every_option_arrives() -> None:
    given = {"batched": True, "lora": True, "eplb": True, "engine": "moeq", "all2all": "x", "quantization": "humming"}
    asked = {"gpu": "A100", "ep": 3, "dp": 4, "dtype": "HALF", "env": {"B": 1, "A": 2}}
    made = make_deployment({**asked, **given, "packages": {"z": 1, "a": 0}})
    assert {name: getattr(made, name) for name in given} == given
    assert (made.tp, made.ep, made.dp, made.dtype) == (1, 3, 4, "fp16")
    assert (made.env, made.packages) == ((("A", "2"), ("B", "1")), (("a", False), ("z", True)))
    assert Deployment.from_json(asdict(made)) == made


def test_a_gpu_is_looked_for_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.deploy.options.detect_gpu", lambda: parse_gpu("V100"))
    assert make_deployment({}) == Deployment(parse_gpu("V100"), dtype="fp16")
    assert make_deployment({"gpu": "H100"}).gpu == parse_gpu("H100")


def test_no_gpu_is_a_usage_error() -> None:
    with pytest.raises(MoeqError) as raised:
        make_deployment({}, detect=False)
    assert raised.value.code == "usage.no-gpu"
    assert 'gpu="H100"' in str(raised.value.hint)


def test_backend_names_are_normalised() -> None:
    assert make_deployment({"gpu": "H100", "backend": "Flashinfer-TRTLLM"}).backend == "flashinfer_trtllm"
