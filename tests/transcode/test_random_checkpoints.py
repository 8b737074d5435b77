"""Random checkpoints to every target: what is said of the result is what a reader of its own finds in the files.

`MOEQ_RANDOM` is the number of seeds. Each goes to every target, under whatever names, by the compiled loops for one
seed of two; what is exact, how many numbers are not and by how much is computed here, with numpy, from both folders.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transcode.random_checkpoints import Checkpoint, Drawn, Tensors, decoded, parts_of, read, write

from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.prove.diff import diff
from moeq.transcode.compare import Loss
from moeq.transcode.naming import NAMES
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import Transcoding, check, transcode

SEEDS = range(int(os.environ.get("MOEQ_RANDOM", "10")))

#: Refusals that are about the target or its names, not about values.
REFUSED = {"usage.target", "usage.names", "usage.regroup", "answer.zero-points"}


def written_module(
    made: Checkpoint, module: str, names: str, *, stays_stacked: bool, floats: bool
) -> tuple[str, int | None]:
    """What a module is called in the result, and its row where it is in a stack (by `docs/how-to/transcode.md`)."""
    drawn = made.drawn
    prefix, expert, name = module.rpartition(".")[0].rpartition(".")[0], *module.split(".")[-2:]
    role = list(reversed(drawn.projections)).index(name)  # down, up, gate
    if names == "source" and floats and drawn.family.projections[0] == "input_linear":
        return f"{prefix.removesuffix('.experts')}.{drawn.family.projections[2 - role]}", int(expert)
    if names == "stacked" or (names == "source" and stays_stacked):
        return f"{prefix}.{('down_proj', 'gate_up_proj', 'gate_up_proj')[role]}", int(expert)
    if names in ("mlp", "block-sparse-moe"):
        container = names.replace("-", "_")
        prefix = ".".join([*prefix.split(".")[:-2], container, "experts"])
    elif names == "source" and (not drawn.stacked or drawn.family.stacking == "per-expert"):
        return module, None
    short = any(part in ("block_sparse_moe", "ffn") for part in prefix.split("."))
    return f"{prefix}.{expert}.{(('w2', 'w3', 'w1') if short else ('down_proj', 'up_proj', 'gate_proj'))[role]}", None


def found_values(made: Checkpoint, tensors: Tensors, target: str, names: str) -> dict[str, np.ndarray]:
    """Values of every projection in the result, by the source's module."""
    drawn, found = made.drawn, {}
    three = len(drawn.projections) == 3
    floats = target in ("bf16", "fp16", "fp32")  # which have the family's own names, where experts are called so
    stays = three and drawn.stacked and (floats or target == "compressed-tensors")
    if floats and three and drawn.family.experts.endswith("experts"):
        stays = drawn.family.stacking != "per-expert" and drawn.family.projections == tuple(drawn.projections)
    for module, (n, k) in made.sizes.items():
        written, row = written_module(made, module, names, stays_stacked=stays, floats=floats)
        if row is None:
            found[module] = decoded(parts_of(tensors, written), n, k, target, drawn.bits)
            continue
        # Gate and up, two halves or alternating, are one matrix, which has blocks and zero points of its own.
        both = written.endswith(("gate_up_proj", "input_linear"))
        parts = rows_of(tensors, written, row)
        if drawn.family.transposed and floats:
            parts["weight"] = parts["weight"].T
        matrix = decoded(parts, 2 * n if both else n, k, target, drawn.bits)
        half = list(drawn.projections).index(module.rpartition(".")[2])
        cut = slice(half, None, 2) if drawn.family.interleaved else slice(half * n, (half + 1) * n)
        found[module] = matrix[cut] if both else matrix
    return found


def rows_of(tensors: Tensors, stack: str, row: int) -> Tensors:
    """The tensors of one expert from those of all."""
    found = {key[len(stack) :]: tensor for key, tensor in tensors.items() if key.startswith(stack)}
    parts = {key.removeprefix(".weight").removeprefix("_"): tensor for key, tensor in found.items()}
    return {
        f"weight_{part}" if part else "weight": tensor[row].contiguous()
        for part, tensor in parts.items()
        if part not in ("shape", "bias")
    }


def expected_losses(made: Checkpoint, found: dict[str, np.ndarray]) -> dict[str, tuple[int, float]]:
    """Numbers that changed and the largest change of every projection, as float32 numbers are compared."""
    losses = {}
    for module, exact in made.values.items():
        with np.errstate(over="ignore", invalid="ignore"):
            before, after = exact.astype(np.float32), found[module].astype(np.float32)
            unequal = (before != after) & ~(np.isnan(before) & np.isnan(after))
            change = np.nan_to_num(np.abs(before.astype(np.float64) - after), nan=np.inf, posinf=np.inf)
        if unequal.any():
            losses[module] = int(unequal.sum()), float(change[unequal].max())
    return losses


def assert_tells(said: tuple[Loss, ...], wanted: dict[str, tuple[int, float]]) -> None:
    """The report's losses are those found in the files, though a stack has one name for several projections."""
    assert sum(loss.numbers for loss in said) == sum(numbers for numbers, _ in wanted.values())
    assert max((loss.max_abs for loss in said), default=0) == max((most for _, most in wanted.values()), default=0)
    assert all(loss.numbers > 0 and loss.blocks <= loss.of_blocks for loss in said)


def attempt(source: Path, out: Path, target: str, names: str) -> Transcoding | MoeqError:
    try:
        return transcode(source, out, target, names=names, allow_lossy=True)
    except MoeqError as error:
        return error


@pytest.mark.cover(every=10)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_is_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    if seed % 2:
        pytest.importorskip("numba")
        monkeypatch.setattr(words, "COMPILED_FROM", 0)
    drawn = Drawn.of(seed)
    made, source = write(tmp_path / "source", drawn), tmp_path / "source"
    draw, wrote = np.random.default_rng([seed, 9]), 0
    for target in ENGINE_TARGETS:
        names = "source" if draw.random() < 0.6 else str(draw.choice(NAMES))
        out = tmp_path / f"{target}-{names}"
        result = attempt(source, out, target, names)
        if isinstance(result, MoeqError):
            assert result.code in REFUSED or (drawn.odd and result.code == "source.bad-data"), (target, str(result))
            assert not out.exists()
            continue
        wrote += 1
        tensors = read(out)
        wanted = expected_losses(made, found_values(made, tensors, target, names))
        where = f"{drawn} to {target} --names {names}"
        assert result.exact == (not wanted), where
        assert_tells(result.losses, wanted)
        asked = check(source, target, names=names)
        assert sorted(asked.losses, key=str) == sorted(result.losses, key=str), where
        assert json.loads((out / "moeq-transcode.json").read_text())["exact"] == result.exact
        compared = diff(source, out)
        assert compared.equal == result.exact, (where, compared.other, compared.missing)
        assert_beside(made, tensors, out)
        if not result.exact:
            with pytest.raises(MoeqError) as error:
                transcode(source, tmp_path / "exact-only", target, names=names)
            assert error.value.code == "answer.not-exact"
            assert not (tmp_path / "exact-only").exists()
    assert wrote or drawn.biased or drawn.odd in ("inf", "nan")  # no engine of other families loads biases


def test_a_layer_is_no_other_name_of_its_container(tmp_path: Path) -> None:
    """Experts of Granite become two modules of their container: what lies beside it is found, and equal."""
    drawn = next(one for one in map(Drawn.of, range(10_000)) if one.family.title == "Granite-MoE" and not one.odd)
    write(tmp_path / "source", drawn)
    found = transcode(tmp_path / "source", tmp_path / "out", "fp32")
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in read(tmp_path / "out")
    compared = diff(tmp_path / "source", tmp_path / "out")
    assert found.exact
    assert compared.equal, compared.other


def assert_beside(made: Checkpoint, tensors: Tensors, out: Path) -> None:
    """Everything else is copied, biases too, and the index names every tensor."""
    beside = {name: tensor for name, tensor in tensors.items() if name in made.beside}
    missing = made.beside.keys() - beside.keys()
    assert len(missing) <= 1, missing  # the router moves along with the experts
    assert all(torch.equal(tensor, made.beside[name]) for name, tensor in beside.items())
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    # Those of a stack are rows of one tensor: the same numbers.
    found, wanted = (sorted(torch.cat([one.flatten() for one in some] or [torch.empty(0)]).tolist())
                     for some in (biases, made.biases.values()))  # fmt: skip
    assert found == wanted
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys()


#: Targets whose result, taken back, is the source's own tensors: by kind of the source, there and back.
BACK = {
    "gptq": ("compressed-tensors", "gptq"),
    "gptq_v2": ("compressed-tensors", "gptq_v2"),
    "ct-int": ("gptq_v2", "compressed-tensors"),
    "fp8-block": ("compressed-tensors", "fp8"),
    "fp8-static": ("compressed-tensors", "modelopt"),
    "mxfp8": ("compressed-tensors", "modelopt"),
}


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("kind", BACK)
def test_there_and_back_again_is_the_source(tmp_path: Path, kind: str) -> None:
    """Byte for byte, where what is stored follows from the values alone."""
    there, back = BACK[kind]
    drawn = map(Drawn.of, range(10_000))
    # vLLM's method for compressed-tensors creates no biases, so experts that have some are not written in it.
    seeds = (one.seed for one in drawn if one.kind == kind and not (one.odd or one.stacked or one.biased))
    for _ in range(2):
        seed = next(seeds)
        source = tmp_path / f"source-{seed}"
        write(source, Drawn.of(seed))
        assert transcode(source, tmp_path / f"there-{seed}", there).exact
        assert transcode(tmp_path / f"there-{seed}", tmp_path / f"back-{seed}", back).exact
        before, after = read(source), read(tmp_path / f"back-{seed}")
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype, name
            assert tensor.numel() == after[name].numel(), name
            octets = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, after[name])]
            assert torch.equal(*octets), name
