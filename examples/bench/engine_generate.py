"""Whole models in vLLM from converted checkpoints, on a GPU: log-probabilities of a prompt, and greedy tokens after it.

    python examples/bench/engine_generate.py tests/data/checkpoints/* --out results.json [--graphs]

For every checkpoint and every layout that the plug-in hands over: convert, have the engine start from the folder as
`vllm serve` does (config, plug-in by its entry point, model class, weight loader, key-value cache, scheduler), and
generate. What it should give comes from transformers in float32 on the CPU, experts by moeq's reference. Errors are
those of the log-probabilities of all tokens at all places of the prompt; a model counts as right up to three times the
error of the same model in bf16 in transformers, which rounds elsewhere, and if no token that it chose is further from
the best one than a twentieth of how far the best is from the mean.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import moeq

#: Engine and scheduler in this process; the engine's own sampler instead of FlashInfer's.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROMPT = [1, 5, 9, 2, 33, 60, 17, 3, 3, 8, 21, 40, 7, 12]
NEW = 6
FACTOR = 3.0
GAP = 0.05


def logits_of(folder: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]` by transformers on the CPU, experts by moeq's reference."""
    from transformers import AutoModelForCausalLM

    import moeq.engines.transformers  # noqa: F401 - registers the quantisation method `moeq`

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.tensor([tokens])).logits[0].float()


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to how log-probabilities differ between tokens."""
    return float((found - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())


def generated(folder: Path, graphs: bool) -> tuple[torch.Tensor, list[int]]:
    """The engine's log-probabilities of the prompt, and its greedy tokens."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=not graphs,
        max_model_len=64,
        max_num_seqs=4,
        max_logprobs=vocabulary,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
        attention_backend="TRITON_ATTN",
        **({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if graphs else {}),
    )
    engine = LLMEngine.from_engine_args(arguments)
    wanted = SamplingParams(
        temperature=0, max_tokens=NEW, prompt_logprobs=vocabulary, detokenize=False, ignore_eos=True
    )
    engine.add_request("0", {"prompt_token_ids": PROMPT}, wanted)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    output = outputs[-1]
    rows = [[row[token].logprob for token in range(vocabulary)] for row in output.prompt_logprobs[1:]]
    return torch.tensor(rows), list(output.outputs[0].token_ids)


def check(folder: Path, graphs: bool) -> dict[str, Any]:
    """One converted checkpoint, in this process."""
    found, new = generated(folder, graphs)
    said = len(PROMPT) - 1
    logits = logits_of(folder, torch.float32, PROMPT + new)[:-1]
    wanted = logits[:said].log_softmax(-1)
    bf16 = logits_of(folder, torch.bfloat16, PROMPT)[:-1].log_softmax(-1)
    error, bf16_error = error_of(found, wanted), error_of(bf16, wanted)
    best, mean = logits[said:].max(-1).values, logits[said:].mean(-1)
    gap = float(((best - logits[said:].gather(1, torch.tensor(new)[:, None])[:, 0]) / (best - mean)).max())
    right = error <= FACTOR * bf16_error and gap <= GAP
    return {"right": right, "error": error, "bf16_error": bf16_error, "gap": gap, "tokens": new}


def ask(folder: Path, graphs: bool) -> dict[str, Any]:
    """The same in a process of its own, whose plug-ins the engine loads by itself."""
    command = [sys.executable, __file__, "--converted", str(folder), *(["--graphs"] if graphs else [])]
    environment = {**os.environ, **ENVIRONMENT}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        named = [line for line in run.stderr.splitlines() if re.match(r"(\[rank0\]: )?[\w.]*(Error|Exception)\b", line)]
        return {"refused": (named or ["no reason given"])[-1][:400], "stderr": run.stderr[-6000:]}
    answer: dict[str, Any] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"right')))
    return answer


def conversions(sources: list[Path], only: list[str] | None, scratch: Path) -> Iterator[tuple[str, str, Path]]:
    """Every checkpoint in every layout of the plug-in that holds it, with rows as its activation takes them."""
    from moeq.engines.vllm.backends import BACKENDS
    from moeq.layouts.registry import layout_class

    for source in filter(Path.is_dir, sources):
        order = "interleaved" if moeq.open(source).info.activation == "swigluoai" else "gate-up"
        for layout in [layout for layout in only or BACKENDS if layout_class(layout).w13_order == order]:
            folder = scratch / f"{source.name}-{layout.partition('/')[0]}"
            with suppress(moeq.MoeqError):  # where the layout does not hold this format
                moeq.convert(source, folder, moeq.Deployment(gpu=moeq.gpu("H200")), layout=layout, force_layout=True)
                yield source.name, layout, folder


def main() -> int:
    """Command line; exits 1 where a model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="*", help="checkpoint folders (files are passed over)")
    parser.add_argument("--converted", type=Path, help="instead: a converted folder, in this process")
    parser.add_argument("--layout", action="append", help="only this layout (more than once: these) [all]")
    parser.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    parser.add_argument("--at-once", type=int, default=1, help="engines that run at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.converted:
        print(json.dumps(check(options.converted, options.graphs)))
        return 0
    from importlib.metadata import version

    about = {
        "schema": "moeq.engine-generate/1",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        **{name: version(name) for name in ("torch", "vllm", "transformers")},
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
        work = list(conversions(options.sources, options.layout, Path(scratch)))
        for (name, layout, _), found in zip(work, pool.map(lambda one: ask(one[2], options.graphs), work), strict=True):
            rows.append({"checkpoint": name, "layout": layout, "graphs": options.graphs, **found})
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
    return f"{row['checkpoint']:32s} {row['layout']:28s} {said}"


if __name__ == "__main__":
    sys.exit(main())
