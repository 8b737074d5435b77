"""What `oracle` and `doctor` suggest where an engine refuses a checkpoint: executed, and the engine asked again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import config, quantization, router, write
from transcode.test_naming import FP8 as CHANNELS
from transcode.test_naming import fp8, stacks

from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.schemes.base import Granularity, QuantKey, ScaleKey, Scheme
from moeq.schemes.format import Described
from moeq.transcode.advise import Advice, _command, _exact, _own_format, _proof, _requests, advise
from moeq.transcode.configs import weights_of
from moeq.transcode.survey import RecodedProjection, TranscodeRequest
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan

#: Refused deployments: checkpoint, GPU, TP, dtype, what is suggested for them.
REFUSED = (
    ("ct-mxfp4-qwen3moe", "MI300X", 1, "bf16", "--to fp8", "checked"),
    ("ct-int4-g128-qwen3moe", "H100", 2, "bf16", "--to compressed-tensors --regroup 64", "exact"),
    ("ct-int4-g128-qwen3moe", "CPU", 2, "bf16", "--to compressed-tensors --regroup 64", "exact"),
    # Ranks would cut the 64 columns of attention too.
    ("gptq-int4-g128-mixtral", "CPU", 2, "fp16", "--to compressed-tensors --regroup 16", "exact"),
    ("gptq-int4-g32-actorder-qwen3moe", "H100", 1, "bf16", "--to bf16 --allow-lossy", "rounded"),
    ("gptq-int8-g64-qwen3moe", "CPU", 1, "bf16", "--to bf16 --allow-lossy", "rounded"),
    ("mxfp4-gptoss", "H100", 1, "fp16", "--to fp16", "checked"),
)


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code = run([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.cover(every=14)
@pytest.mark.parametrize(("name", "gpu", "tp", "dtype", "options", "proof"), REFUSED)
@pytest.mark.parametrize("command", ["oracle", "doctor"])
def test_what_is_suggested_works(
    checkpoints: Path, tmp_path: Path, capsys, command: str, name: str, gpu: str, tp: int, dtype: str, options: str,
    proof: str,
) -> None:  # fmt: skip
    where = ("--gpu", gpu, "--tp", tp, "--dtype", dtype)
    code, document = said(capsys, command, checkpoints / name, *where)
    found = (document if command == "oracle" else document["deployment"])["transcode"]
    assert (code, found["proof"]) == (1, proof)
    assert found["command"] == f"moeq transcode {checkpoints / name} DST {options}"
    run([command, str(checkpoints / name), *map(str, where)])
    assert "  transcode  moeq transcode " in capsys.readouterr().out
    words = shlex.split(found["command"])[1:]
    words[words.index("DST")] = str(tmp_path / "out")
    assert run(words) == 0
    capsys.readouterr()
    code, document = said(capsys, "oracle", tmp_path / "out", *where)
    assert code == 0
    assert document["verdict"]["selected"]["backend"] == found["backend"]
    assert document["transcode"] is None


def test_asymmetric_gptq_becomes_compressed_tensors(checkpoints: Path, tmp_path: Path, capsys) -> None:
    """vLLM takes no asymmetric GPTQ, whatever the GPU."""
    made = tmp_path / "asymmetric gptq"
    assert run(["transcode", str(checkpoints / "ct-int4-asym-g32-mixtral"), str(made), "--to", "gptq_v2"]) == 0
    capsys.readouterr()
    code, document = said(capsys, "oracle", made, "--gpu", "H100")
    assert code == 1
    assert document["transcode"]["command"] == f"moeq transcode '{made}' DST --to compressed-tensors"
    assert document["transcode"]["proof"] == "exact"


@pytest.mark.parametrize(
    ("name", "deployment"),
    [
        # A dtype that the device lacks, heads that do not divide, and moeq's own engine: no format changes that.
        ("ct-int4-g128-qwen3moe", Deployment(gpu=parse_gpu("T4"))),
        ("ct-int4-g128-qwen3moe", Deployment(gpu=parse_gpu("H100"), tp=4)),
        ("ct-mxfp4-qwen3moe", Deployment(gpu=parse_gpu("T4"), engine="moeq")),
        # gpt-oss' loader looks for stacked experts, which only its own format and floats have.
        ("mxfp4-gptoss", Deployment(gpu=parse_gpu("T4"))),
    ],
)
def test_nothing_is_suggested_where_nothing_helps(checkpoints: Path, name: str, deployment: Deployment) -> None:
    assert advise(open_checkpoint(checkpoints / name), deployment) is None


@pytest.mark.slow
def test_many_refusals_have_a_suggestion(checkpoints: Path) -> None:
    """Over all checkpoints and many deployments: a suggestion is made only where the engine refuses the source."""
    count = 0
    for path in sorted(path for path in checkpoints.iterdir() if path.is_dir()):
        ckpt = open_checkpoint(path)
        for gpu in ("T4", "A100", "B200", "MI300X", "CPU"):
            for tp in (1, 2):
                deployment = Deployment(gpu=parse_gpu(gpu), tp=tp, dtype="fp16")
                if judge_checkpoint(ckpt, deployment, explain=False).ok:
                    continue
                found = advise(ckpt, deployment, "SRC")
                count += found is not None
                assert found is None or found.command.startswith("moeq transcode SRC DST --to ")
    assert count > 20


@pytest.mark.parametrize(("name", "own"), [("gptq-int4-g32-qwen3moe", "gptq"), ("ct-int4-g128-qwen3moe", None)])
@pytest.mark.parametrize(
    ("sizes", "groups"), [({}, []), ({"tp": 2}, [64, 32, 16]), ({"tp": 2, "ep": 2}, []), ({"ep": 2}, [])]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_transcodings_are_tried_in_order(checkpoints: Path, name: str, own: str | None, sizes, groups, dtype) -> None:
    """The source's own format, compressed-tensors, finer groups of it where ranks cut them, others, floats at last."""
    where = Deployment(parse_gpu("H100"), dtype=dtype, **sizes)
    found = list(_requests("src", open_checkpoint(checkpoints / name), where))
    assert all((row.src, row.revision) == ("src", None) for row in found)
    first = [own] if own else []
    targets = [row.to for row in found]
    start = len(first) + 1 + len(groups)
    assert targets[:start] == [*first, *["compressed-tensors"] * (1 + len(groups))]
    assert [row.regroup for row in found] == [*[None] * (len(first) + 1), *groups, *[None] * (len(found) - start)]
    assert targets[-1] == dtype
    others = targets[start:-1]
    assert "compressed-tensors" not in others
    assert {"fp8", "gptq_v2"} <= set(others)
    assert not {"bf16", "fp16", "fp32"} & set(others)


def test_a_command_has_what_was_asked_for() -> None:
    request = TranscodeRequest("a b", "fp8")
    assert _command(request, "exact") == "moeq transcode 'a b' DST --to fp8"
    more = TranscodeRequest("a", "gptq", "main x", regroup=64, names="mlp")
    assert _command(more, "rounded") == (
        "moeq transcode a DST --to gptq --revision 'main x' --regroup 64 --names mlp --allow-lossy"
    )


def test_modules_that_the_engine_cannot_load_become_floats(checkpoints: Path, tmp_path: Path, capsys) -> None:
    """Attention of 64 features has no whole FP8 blocks in vLLM's fused module; its output projection of 128 has."""
    source, out = checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out"
    code, document = said(capsys, "transcode", source, out, "--to", "fp8", "--allow-lossy")
    assert code == 0
    assert any("q_proj and 5 more in this format: written as floats" in note for note in document["notes"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    left = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkv"}
    assert left < set(config["modules_to_not_convert"])
    made = open_checkpoint(out)
    assert {made.source.tensors[f"{name}.weight"].dtype for name in left} == {"F32"}
    assert made.source.tensors["model.layers.0.self_attn.o_proj.weight"].dtype == "F8_E4M3"
    assert judge_checkpoint(made, Deployment(parse_gpu("H100")), explain=False).ok
    resumed, document = said(capsys, "transcode", source, out, "--to", "fp8", "--allow-lossy")
    assert (resumed, document["already_done"]) == (0, True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write(tmp_path_factory.mktemp("advise")))


@pytest.fixture(scope="module")
def plan(made: Checkpoint) -> TranscodePlan:
    return make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors"))


INT4 = MatrixSpec("down", 128, 256, "int4", 128, "f16")
FP8 = MatrixSpec("down", 128, 256, "e4m3", 128, "f32")
NVFP4 = MatrixSpec("down", 128, 256, "e2m1", 16, "e4m3")


@pytest.mark.parametrize(
    ("before", "granularity", "after", "spelling", "to", "exact"),
    [
        (INT4, "group", INT4, "ct-pack", "compressed-tensors", True),
        (INT4, "group", replace(INT4, scale_dtype="f32"), "ct-pack", "compressed-tensors", False),
        (INT4, "group", replace(INT4, element="int8"), "ct-pack", "compressed-tensors", False),
        (INT4, "group", INT4, "gptq", "gptq", True),
        (replace(INT4, symmetric=False), "group", replace(INT4, symmetric=False), "gptq", "gptq", False),
        (replace(INT4, symmetric=False), "group", replace(INT4, symmetric=False), "gptq", "gptq_v2", True),
        (replace(INT4, symmetric=False), "group", replace(INT4, symmetric=False), "ct-pack", "gptq", True),
        (FP8, "block", FP8, "fp8-block", "fp8", True),
        (FP8, "block", FP8, "modelopt-fp8-block", "modelopt", True),
        (replace(FP8, group_size=256), "channel", FP8, "fp8-block", "fp8", False),
        (replace(FP8, group_size=256), "channel", FP8, "ct-fp8-block", "compressed-tensors", False),
        (NVFP4, "group", NVFP4, "modelopt-nvfp4", "nvfp4", True),
        (NVFP4, "group", NVFP4, "ct-nvfp4", "compressed-tensors", False),
    ],
)
def test_what_stays_whatever_the_data(
    plan: TranscodePlan, before: MatrixSpec, granularity: Granularity, after: MatrixSpec, spelling: str, to: str,
    exact: bool,
) -> None:  # fmt: skip
    key = QuantKey(before.element, "", ScaleKey(before.scale_dtype, granularity, (1, before.group_size)))
    weights = weights_of(spelling, after, after.group_size, activations=False)
    projected = RecodedProjection(Described(Scheme("any", key), before), spelling, after, weights)
    assert _exact(projected, replace(plan, request=replace(plan.request, to=to))) is exact


@pytest.mark.parametrize(
    ("name", "to", "proof"),
    [
        ("gptq-int4-g32-qwen3moe", "compressed-tensors", "exact"),
        ("gptq-int4-g32-qwen3moe", "bf16", "rounded"),
        ("gptq-int4-g32-qwen3moe", "fp8", None),
        ("ct-int4-asym-g32-mixtral", "gptq", "checked"),
        ("ct-mxfp4-qwen3moe", "bf16", "checked"),
        ("ct-mxfp4-qwen3moe", "fp8", "checked"),
        ("ct-fp8-tensor-qwen3moe", "fp8", "checked"),
        ("ct-nvfp4-qwen3moe", "nvfp4", "exact"),
    ],
)
def test_fates_of_values(checkpoints: Path, name: str, to: str, proof: str | None) -> None:
    """Integers under the scales of FP8 blocks would be rounded: nobody is told to do that."""
    assert _proof(make_transcode_plan(open_checkpoint(checkpoints / name), TranscodeRequest("src", to))) == proof


@pytest.mark.parametrize(
    ("table", "target"),
    [
        (quantization(), "gptq"),
        (quantization(checkpoint_format="gptq_v2"), "gptq_v2"),
        (quantization(quant_method="awq", checkpoint_format="gptq_v2"), None),
        (quantization(quant_method="fp8"), "fp8"),
        (None, None),
    ],
)
def test_formats_of_sources(tmp_path: Path, table: dict[str, Any] | None, target: str | None) -> None:
    assert _own_format(open_checkpoint(write(tmp_path, document=config(quantization_config=table)))) == target


def test_advice_is_told() -> None:
    told = {
        "exact": "every value stays",
        "checked": "written only if every value fits",
        "rounded": "values that do not fit are rounded once",
    }
    for proof, words in told.items():
        one = Advice("moeq transcode a b --to fp8", "MARLIN", proof)  # type: ignore[arg-type]
        assert one.text == f"moeq transcode a b --to fp8 (MARLIN takes it; {words})"
        assert one.to_json() == {"command": "moeq transcode a b --to fp8", "backend": "MARLIN", "proof": proof}


def test_a_revision_is_asked_for_again(tmp_path: Path) -> None:
    made = open_checkpoint(write(tmp_path))
    made.source.revision = "abc"
    found = list(_requests("src", made, Deployment(parse_gpu("H100"), tp=2)))
    assert {row.revision for row in found} == {"abc"}
    assert [row.to for row in found][:2] == ["gptq", "compressed-tensors"]
    assert [row.to for row in found].count("gptq") == 2  # its own, and among the others


@pytest.mark.parametrize(
    ("architecture", "gpu", "options", "backend", "proof"),
    [
        ("UnheardOf", "H100", "--to compressed-tensors", "VLLM_CUTLASS", "exact"),
        ("UnheardOf", "CPU", "--to bf16 --names stacked", "CPU", "checked"),
        ("Qwen3MoeForCausalLM", "H100", "--to compressed-tensors", "VLLM_CUTLASS", "exact"),
        ("Qwen3MoeForCausalLM", "CPU", "--to bf16", "CPU", "checked"),
    ],
)
def test_stacks_stay_stacks_for_a_class_that_nothing_is_known_of(
    tmp_path: Path, architecture: str, gpu: str, options: str, backend: str, proof: str
) -> None:
    tensors = {**router(), **stacks(fp8)}
    made = open_checkpoint(write(tmp_path, tensors, config(quantization_config=CHANNELS, architectures=[architecture])))
    found = advise(made, Deployment(parse_gpu(gpu)), "SRC")
    assert found == Advice(f"moeq transcode SRC DST {options}", backend, proof)  # type: ignore[arg-type]
