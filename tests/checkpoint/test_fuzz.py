"""Random damage to headers, indices and configs: it ends in a MoeqError or in success, soon, and in bounded memory.

Seeds are fixed, so a failure is repeatable.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    WIDTHS,
    Stored,
    Tensors,
    config,
    ct,
    experts,
    file_bytes,
    gptq,
    halved,
    header_of,
    quantization,
    router,
    write,
    write_sharded,
)

import moeq
from moeq.errors import MoeqError
from moeq.model.scan import scan

#: Damaged checkpoints of each kind.
ROUNDS = 60

#: Most a single hostile checkpoint of a few kilobytes may add to the process, in MiB.
MEMORY_MIB = 64

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1.5, float("inf"),
    "", "x", "4", "\x1b[2J", "\ud800", "a" * 3000, [], [1], [[]], {}, {"a": 1}, {"": None},
)  # fmt: skip

Damage = Callable[[random.Random, Path], None]


def swap_bytes(random_source: random.Random, folder: Path) -> None:
    """A few random bytes in the first kilobytes of the weights (length, header, start of the data)."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    for _ in range(random_source.choice((1, 2, 8))):
        data[random_source.randrange(min(len(data), 6000))] = random_source.randrange(256)
    path.write_bytes(data)


def cut_or_extend(random_source: random.Random, folder: Path) -> None:
    """A file that ends early or goes on."""
    path = folder / random_source.choice(("model.safetensors", "config.json"))
    data = path.read_bytes()
    end = random_source.randrange(len(data))
    path.write_bytes(data[:end] if random_source.random() < 0.7 else data + data[:end])


def change_header(random_source: random.Random, folder: Path) -> None:
    """Valid JSON with wrong values in it, over data of the right length."""
    header = header_of({**router(), **experts()})
    data = bytes(max(entry["data_offsets"][1] for entry in header.values()))
    for _ in range(random_source.choice((1, 3))):
        _change(random_source, header)
    (folder / "model.safetensors").write_bytes(file_bytes(json.dumps(header).encode("utf-8", "surrogatepass"), data))


def change_tensors(random_source: random.Random, folder: Path) -> None:
    """A well-formed file whose expert tensors have other dtypes, shapes and parts than they should."""
    makers = (gptq, ct(4), plain_mxfp4)
    tensors = {**router(), **experts(make=random_source.choice(makers))}
    for _ in range(random_source.choice((1, 2, 6))):
        name = random_source.choice(list(tensors))
        stored = tensors.pop(name)
        if random_source.random() < 0.2:
            continue
        shape = list(stored.shape)
        for _ in range(random_source.choice((0, 1))):
            shape.insert(random_source.randrange(len(shape) + 1), random_source.choice((0, 1, 2, 8)))
        if shape and random_source.random() < 0.5:
            shape[random_source.randrange(len(shape))] = random_source.choice((0, 1, 2, 16, 33, 64))
        if shape and random_source.random() < 0.2:
            shape.pop()
        dtype = random_source.choice((stored.dtype, stored.dtype, *WIDTHS))
        leaf = random_source.choice(
            (name.rpartition(".")[2], "weight", "scales", "weight_scale", "qzeros", "scale", "bias")
        )
        tensors[f"{name.rpartition('.')[0]}.{leaf}"] = Stored(dtype, tuple(shape))
    write(folder, tensors, config(quantization_config=random_source.choice(QUANTIZATIONS)()))


def plain_mxfp4(n: int, k: int) -> Tensors:
    return {"weight": Stored("U8", (n, k // 2)), "weight_scale": Stored("U8", (n, k // 32))}


def change_config(random_source: random.Random, folder: Path) -> None:
    """Valid JSON with wrong values in it."""
    path = folder / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"] = random_source.choice(QUANTIZATIONS)()
    for _ in range(random_source.choice((1, 2, 4))):
        _change(random_source, document)
    path.write_text(json.dumps(document))


def change_index(random_source: random.Random, folder: Path) -> None:
    """An index that says something else."""
    write_sharded(folder, dict(zip(("a.safetensors", "b.safetensors"), halved(), strict=True)))
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    for _ in range(random_source.choice((1, 3))):
        _change(random_source, document)
    path.write_text(json.dumps(document))


def ct_table() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
    group = {"targets": ["Linear", "re:.*experts.*"], "weights": weights, "input_activations": dict(weights)}
    table = {"quant_method": "compressed-tensors", "ignore": ["re:.*gate$"], "format": "pack-quantized"}
    return {**table, "config_groups": {"group_0": group}}


def modelopt_table() -> dict[str, Any]:
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "FP8"}}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def quark_table() -> dict[str, Any]:
    spec = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}
    return {"quant_method": "quark", "global_quant_config": {"weight": spec}, "exclude": ["*x*"], "export": {}}


QUANTIZATIONS: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: quantization(dynamic={"+:.*experts.*": {"bits": 4}}, meta={"quantizer": ["gptqmodel:1"]}),
    lambda: {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    lambda: {"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": {".*gate": {"bits": 16}}},
    ct_table,
    quark_table,
    modelopt_table,
    lambda: {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["a"]},
    lambda: {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
)


def _change(random_source: random.Random, document: Any) -> None:
    """Replace, remove or add one value somewhere inside."""
    places = list(_places(document))
    holder, key = random_source.choice(places)
    action = random_source.random()
    if action < 0.75:
        holder[key] = random_source.choice(ODD_VALUES)
    elif action < 0.9:
        del holder[key]
    elif isinstance(holder, dict):
        holder[random_source.choice(("x", "", "model.layers.0.mlp.experts.00.w1.weight", "\x00"))] = holder[key]


def _places(document: Any) -> Any:
    items = list(document.items()) if isinstance(document, dict) else list(enumerate(document))
    for key, value in items:
        yield document, key
        if isinstance(value, (dict, list)) and value:
            yield from _places(value)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    "damage", [swap_bytes, cut_or_extend, change_header, change_tensors, change_config, change_index]
)
def test_damage_ends_in_success_or_one_error(damage: Damage, tmp_path: Path) -> None:
    write(tmp_path / "warm-up")
    scan(moeq.open(tmp_path / "warm-up"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened = 0
    for number in range(ROUNDS):
        random_source = random.Random(f"{damage.__name__}-{number}")
        folder = write(tmp_path / "case")
        damage(random_source, folder)
        opened += attempt(folder, f"{damage.__name__} round {number}")
    assert opened < ROUNDS, "some damage has to be noticed"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_MIB * 1024


def attempt(folder: Path, label: str) -> bool:
    """Open, describe, scan and decode; True where all of it worked."""
    started, refusal = time.process_time(), None
    try:
        checkpoint = moeq.open(folder)
        json.dumps(checkpoint.info.to_json())
        scan(checkpoint)
        checkpoint.matrix(checkpoint.info.moe_layers[0], 0, "w13")
    except MoeqError as error:
        refusal = error
    except Exception as error:  # noqa: BLE001 - the round is what makes the failure repeatable
        pytest.fail(f"{label}: {type(error).__name__}: {error}")
    assert time.process_time() - started < 5, label
    assert refusal is None or (refusal.message.isprintable() and len(refusal.message) < 2000), label
    return refusal is None
