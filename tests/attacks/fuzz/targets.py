"""Parsers of strangers' files as functions of bytes, with what may never happen: a bug, a flood, a write elsewhere.

Each target puts its bytes into a small checkpoint, opens that as commands do, and lets through no exception but an
expected failure. `tests/attacks/fuzz/run.py` feeds them by coverage, `tests/attacks/test_fuzz_parsers.py` by structure.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
SEEDS = Path(__file__).parents[2] / "data" / "fuzz"

#: What one input may cost.
SECONDS, MEBIBYTES = 2.0, 512

Target = Callable[[bytes], None]


class Broken(AssertionError):
    """An invariant does not hold."""


@cache
def room() -> Path:
    """A folder for all targets, watched: nothing is written outside of it."""
    folder = Path(tempfile.mkdtemp(prefix="moeq-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


_watched = False
_inside = [False]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _inside[0]:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        paths = arguments[:1]
    elif event in _CHANGES:
        paths = arguments[:2]
    else:
        return
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            real = os.path.abspath(os.fsdecode(path))
            if not real.startswith((str(room()), "/dev/null")):
                raise Broken(f"{event} of {real}")


def watched(action: Callable[[], object], data: bytes) -> None:
    """Run it: an expected failure or success, soon, in bounded memory, and nothing changed elsewhere."""
    global _watched
    from moeq.errors import MoeqError

    if not _watched:
        sys.addaudithook(_audit)
        _watched = True
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    # The bytecode of a module that a parser imports late would be a file elsewhere.
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _inside[0] = True
    try:
        action()
    except MoeqError as error:
        if error.code.startswith("bug"):
            raise Broken(error.message) from error
        if not error.message.isprintable() and "\n" not in error.message:
            raise Broken(f"message is not printable: {error.message!a}") from error
    finally:
        _inside[0], sys.dont_write_bytecode = False, kept
    if time.process_time() - started > SECONDS:
        raise Broken(f"took {time.process_time() - started:.1f} s for {len(data)} bytes")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEBIBYTES:
        raise Broken(f"took {grown:.0f} MiB for {len(data)} bytes")


def described(folder: Path) -> None:
    """What `inspect --gpu` reads."""
    import moeq
    from moeq.deploy.deployment import Deployment
    from moeq.deploy.gpus import parse_gpu
    from moeq.pipeline.plan.layer_verdict import judge_checkpoint

    checkpoint = moeq.open(folder)
    json.dumps(checkpoint.info.to_json())
    if checkpoint.kind == "source":
        judge_checkpoint(checkpoint, Deployment(gpu=parse_gpu("H100")))


@cache
def source(name: str, purpose: str) -> Path:
    folder = room() / purpose
    shutil.copytree(CHECKPOINTS / name, folder)
    (folder / "quantize_config.json").unlink(missing_ok=True)
    return folder


@cache
def converted() -> Path:
    """A finished conversion, and the partial folder of another one."""
    from moeq.deploy.deployment import Deployment
    from moeq.deploy.gpus import parse_gpu
    from moeq.pipeline.convert import convert

    out = room() / "converted"
    deployment = Deployment(gpu=parse_gpu("A100"))
    convert(CHECKPOINTS / "gptq-int4-g32-qwen3moe", out, deployment)
    convert(CHECKPOINTS / "gptq-int4-g32-qwen3moe", room() / "shared", deployment, shard="0/1")
    return out


def header(data: bytes) -> None:
    """A whole safetensors file."""
    folder = source("gptq-int4-g32-qwen3moe", "header")
    (folder / "model.safetensors").write_bytes(data)
    watched(lambda: described(folder), data)


def config(data: bytes) -> None:
    """`config.json`, the quantisation config in it included."""
    folder = source("gptq-int4-g32-qwen3moe", "config")
    (folder / "config.json").write_bytes(data)
    watched(lambda: described(folder), data)


def index(data: bytes) -> None:
    """`model.safetensors.index.json`."""
    folder = source("mxfp4-gptoss", "index")
    (folder / "model.safetensors.index.json").write_bytes(data)
    watched(lambda: described(folder), data)


def manifest(data: bytes) -> None:
    """`moeq.json`."""
    from moeq.prove.verify import verify

    folder = converted()
    kept = (folder / "moeq.json").read_bytes()
    (folder / "moeq.json").write_bytes(data)
    try:
        watched(lambda: (described(folder), verify(folder, workers=1)), data)
    finally:
        (folder / "moeq.json").write_bytes(kept)


def restore_data(data: bytes) -> None:
    """`moeq-restore.data`, read as restore reads it."""
    from moeq.checkpoint.manifest import read_manifest
    from moeq.model import Checkpoint
    from moeq.model import open as open_checkpoint
    from moeq.pipeline.state.restore_data import KeptSource, RestoreData

    folder = converted()
    kept = (folder / "moeq-restore.data").read_bytes()
    (folder / "moeq-restore.data").write_bytes(data)
    opened = open_checkpoint(folder).source
    entry = read_manifest(folder).restore
    try:
        watched(lambda: Checkpoint(KeptSource(opened, RestoreData(folder / "moeq-restore.data", entry), None)), data)
    finally:
        (folder / "moeq-restore.data").write_bytes(kept)


def journal(data: bytes) -> None:
    """A journal: its lines get right seals, so that what they say is read; then as it is."""
    from moeq.checkpoint.outputs import OutputFolder
    from moeq.pipeline.finalize import finalize
    from moeq.pipeline.state import journal as journals

    converted()
    partial = room() / "shared.moeq-partial"
    (path,) = partial.glob("moeq-journal*")
    kept = path.read_bytes()
    lines, first = [], b""
    for line in data.split(b"\n"):
        body = line.rpartition(journals._SEAL)[0] or line
        sealed = body + journals._SEAL + journals.blake3(first + body).hexdigest().encode() + b'"}'
        first = first or journals._seal_of(sealed)
        lines.append(sealed)

    def read() -> None:
        with OutputFolder(partial) as files:
            found = journals.read_journals(files)
        stamp = next(iter(found.stamps.values()), None)
        if stamp is not None:
            journals.require_job(found, stamp, partial)
        if not found.stamps:
            finalize(room() / "shared")

    try:
        for content in (b"\n".join(lines) + b"\n", data):
            path.write_bytes(content)
            watched(read, data)
    finally:
        path.write_bytes(kept)


def gguf(data: bytes) -> None:
    """A whole GGUF file; tensors that the converter changed are turned back, an expert decoded."""
    import torch  # noqa: F401 - imported before the clock starts

    import moeq

    path = room() / "model.gguf"
    path.write_bytes(data)

    def read() -> None:
        checkpoint = moeq.open(path)
        for made in checkpoint.source._made.values():  # type: ignore[attr-defined] # `open` writes them elsewhere
            made(checkpoint.source.read_bytes)
        checkpoint.dequantize(0, 0, "gate")

    watched(lambda: described(path), data)
    watched(read, data)


def orphan(method: str) -> Target:
    """A target of whole safetensors files with a method that engines dropped; an expert is decoded, too."""

    def run(data: bytes) -> None:
        import moeq

        folder = orphan_folder(method)
        (folder / "model.safetensors").write_bytes(data)
        watched(lambda: described(folder), data)
        watched(lambda: moeq.open(folder).dequantize(0, 0, "gate"), data)

    return run


@cache
def orphan_folder(seed: str) -> Path:
    import orphan_files

    names = {"hqq": "4-bit-axis1-g8-bfloat16", "torchao": "int4-g8-asym", "torchao-mx": "mx-nvfp4-single"}
    method = seed.partition("-")[0]
    vector = orphan_files.vectors(method)[names[seed]]
    return orphan_files.WRITERS[method](room() / f"{seed}-source", vector)


TARGETS: dict[str, Target] = {
    "gguf": gguf,
    "header": header,
    "config": config,
    "index": index,
    "manifest": manifest,
    "restore-data": restore_data,
    "journal": journal,
    "hqq": orphan("hqq"),
    "torchao": orphan("torchao"),
}


def gguf_seeds() -> list[bytes]:
    """Small models of some architectures."""
    import numpy as np
    from gguf_files import gguf_bytes, moe_metadata, moe_tensors, random_tensor

    sizes = {"layers": 1, "hidden": 64, "inner": 32, "experts": 2}
    rng = np.random.default_rng(0)
    tensors = moe_tensors(rng, **sizes)
    found = [gguf_bytes(moe_metadata(name, **sizes), tensors) for name in ("qwen3moe", "llama", "deepseek2", "gpt-oss")]
    decays = ("f32", (4,), np.full(4, -0.5, np.float32).tobytes())
    linear = {"attn_qkv": (48, 64), "attn_gate": (32, 64), "ssm_conv1d": (48, 4), "ssm_out": (64, 32)}
    shared = {"ffn_gate_shexp": (32, 64), "ffn_up_shexp": (32, 64), "ffn_down_shexp": (64, 32)}
    hybrid = {f"blk.0.{name}.weight": random_tensor(rng, "f32", shape) for name, shape in (linear | shared).items()}
    keys = {"state_size": 4, "group_count": 2, "time_step_rank": 4, "inner_size": 32, "conv_kernel": 4}
    more = {**{f"ssm.{key}": value for key, value in keys.items()}, "expert_shared_feed_forward_length": 32}
    for name in ("qwen3next", "qwen35moe", "jamba", "granitemoe"):
        given = more | ({"ssm.inner_size": 128} if name == "jamba" else {})
        whole = tensors | hybrid | {"blk.0.ssm_a": decays}
        found.append(gguf_bytes(moe_metadata(name, **sizes, **given), whole))
    return found


@cache
def orphan_seed(seed: str) -> bytes:
    return (orphan_folder(seed) / "model.safetensors").read_bytes()


def seeds(name: str) -> list[bytes]:
    """The kept corpus of a target, and the real files that it starts from."""
    found = [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]
    real = CHECKPOINTS / "gptq-int4-g32-qwen3moe"
    if name == "header":
        found.append((real / "model.safetensors").read_bytes()[:200_000])
    elif name == "config":
        found += [path.read_bytes() for path in sorted(CHECKPOINTS.glob("*/config.json"))]
    elif name == "index":
        found += [path.read_bytes() for path in sorted(CHECKPOINTS.glob("*/*.index.json"))]
    elif name == "manifest":
        found.append((converted() / "moeq.json").read_bytes())
    elif name == "gguf":
        found += gguf_seeds()
    elif name in ("hqq", "torchao"):
        found += map(orphan_seed, ("torchao", "torchao-mx") if name == "torchao" else (name,))
    elif name == "restore-data":
        found.append((converted() / "moeq-restore.data").read_bytes())
    else:
        converted()
        found.append(next((room() / "shared.moeq-partial").glob("moeq-journal*")).read_bytes())
    return found
