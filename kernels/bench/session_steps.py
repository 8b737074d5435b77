"""What a session on an H100 or H200 has to measure, in order. Data only: `gpu_session.py` runs it, TUNING.md shows it.

A new step is a row here; `python kernels/bench/gpu_session.py --rehearse --only NAME` tries it without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A command and what it decides.

    Attributes:
        name: of its results, which lie under `{out}` of the command.
        minutes: it is stopped after one and a half times as many.
        command: words of a shell, from the repository's root.
        decides: why it is run.
        rehearsal: words that are added where there is no GPU; what the command does then is real, but small.
        after: steps without which this one's figures do not count: they have to end well first.
        gpus: it needs.
        module: that has to be installed.
    """

    name: str
    minutes: float
    command: str
    decides: str
    rehearsal: str = ""
    after: tuple[str, ...] = ()
    gpus: int = 1
    module: str = ""


_BYTES = "python kernels/bench/w8a8_bench.py"
_PEERS = "python -m bench.peers run --warm 12 --warm-seconds 150"
_SERVE = "python examples/bench/serve.py --rounds 2 --users 1,8,32,128 --together --folder {out}/../checkpoints"
#: NCCL without multicast and without kernels of the engine's own between GPUs, which not every machine allows.
_TWO = "-- --tensor-parallel-size 2 --disable-custom-all-reduce"
_TINY = "--layers 1 --experts 8"
_NO_TIME = "--seconds 1 --warm 0 --tokens 1"

STEPS = (
    Step(
        "plan-sweep", 5,
        "python kernels/bench/plan_sweep.py --formats int4,mxfp4,w8a8,fp8-block,nvfp4 --seed 4 --seconds "
        "200 --out {out}/plan-sweep.json",
        "on an H100: layers that nobody looked at when plans were fitted (`plan_regret.py`), as an H200 has had",
        "--dry-run",
    ),
    Step(
        "few-tiles", 3,
        "python kernels/bench/plan_sweep.py --cell int4:mixtral-8x7b-tp8:8,16,32,64 --cell mxfp4:mixtral-8x7b-tp8:8,32 "
        "--cell int4:12x4x1920x896:5,9,20 --cell int4:12x4x1280x2688:23,34,56 --cell w8a8:glm-4.5-air:8,16,32 "
        "--seconds 120 --out {out}/few-tiles.json",
        "where an H100 is behind Humming by more than 2 %, and layers of few small tiles", "--dry-run",
    ),
    Step(
        "peers-fp4", 9,
        f"{_PEERS} --seconds 520 --formats mxfp4,mxfp4-fp8,mxfp4-silu,int4-fp8,int4 --tokens 4096,512,32,1 "
        "--contenders moeq,flashinfer,flashinfer-fp8,turbomind,vllm-cutlass-w4a8 "
        "--shapes qwen3-30b-a3b,gpt-oss-20b,mixtral-8x7b --out {out}/peers-fp4",
        "cells against FlashInfer that are left (19 have run with bf16 activations, mostly at 8 and 128 tokens; with "
        "e4m3 ones none since MXFP4 x e4m3 has been faster), and TurboMind, whose process ended in most; Humming is "
        "left out, as it packs for six seconds a group. "
        "FlashInfer's module is built before (`bench.bundle.flashinfer_module`, 75 minutes of a processor for both "
        "kinds of activations)", _NO_TIME, module="vllm",
    ),
    *(
        Step(
            f"peers-{fmt}", 8,
            f"{_PEERS} --seconds 460 --rounds 2 --milliseconds 15 --formats {fmt} --tokens 8,128,32,512,4096,1 "
            f"--contenders moeq,humming,{peer} --out {{out}}/peers-{fmt}",
            f"the musts for {fmt} on the whole grid with the present plans; {ran}", _NO_TIME, module="vllm",
        )
        for fmt, peer, ran in (
            ("w8a8", "vllm-triton", "on an H200 64 of 66 won on 26 November, on an H100 61"),
            ("int4", "marlin", "on an H200 66 of 66 won on 26 November, without Marlin; on an H100 59"),
            ("mxfp4", "triton_kernels", "66 of 66 won on both on 26 November, without triton_kernels"),
        )
    ),
    Step(
        "peers-fp8", 8,
        f"{_PEERS} --seconds 460 --formats fp8-block-w8a8,fp8-w8a8,nvfp4 --out {{out}}/peers-fp8",
        "cells against DeepGEMM, vLLM's Triton and CUTLASS, Humming and Marlin with the present kernels; 11 ran with "
        "those before", _NO_TIME, module="vllm",
    ),
    Step(
        "serve-gpt-oss-ep2", 8,
        f"{_SERVE} --model gpt-oss-20b --format mxfp4 --backend marlin --row auto --row marlin --row converted:moeq "
        f"--out {{out}}/serve-gpt-oss-ep2.json {_TWO} --enable-expert-parallel",
        "another model than Qwen3-30B on two GPUs", _TINY, gpus=2, module="vllm",
    ),
    Step(
        "serve-tp2-humming", 8,
        f"{_SERVE} --model qwen3-30b-a3b --format gptq --row marlin --row humming --row converted:moeq "
        f"--out {{out}}/serve-tp2-humming.json {_TWO}",
        "TP 2 beside Humming, which died of an illegal memory access on two H200s", _TINY, gpus=2, module="vllm",
    ),
    Step(
        "check", 9, "python kernels/bench/hopper_check.py --quick --seconds 480 --out {out}/check.json",
        "numbers of every family, format and plan in one call (some 1300 builds, on all processors)",
        "--dry-run --layers nvfp4,fp8-channel,w8a8-oai,fp8-fp8-odd,blocks-oai,w4a8-oai",
    ),
    Step(
        "transcode", 9, "python examples/bench/transcode_generate.py --source qwen3_moe-w8a8 --source gpt_oss-mxfp4 "
        "--source qwen3_moe-fp8-block --source qwen3_moe-fp8-channel --source qwen3_moe-fp8-tensor "
        "--source deepseek_v2-gptq --source glm4_moe-gptq --out {out}/transcode.json",
        "source and transcoded checkpoint generate the same in vLLM on a GPU: formats and families that have not run",
        module="vllm",
    ),
    Step(
        "few-plans", 6,
        "python kernels/bench/hopper_bench.py --shapes qwen3-30b,deepseek-v3-tp8 --formats nvfp4,fp8,mxfp8 "
        "--tokens 1,8,32,128 --sweep --seconds 330 --out {out}/few-plans.json",
        "tables of their own for NVFP4 (it has MXFP4's) and for FP8 and MXFP8 (they have int4's)", "--dry-run",
    ),
    Step(
        "fp8-plans", 6,
        f"{_BYTES} --codes fp8-block --sweep --shapes qwen3-30b --tokens 16,64,512,2048 --out {{out}}/fp8-plans.json",
        "where narrow 64 should end, stages, two programs a multiprocessor", "--dry-run",
    ),
    Step(
        "sanitizer", 5, "python kernels/bench/sanitizer.py --out {out}/sanitizer.json --seconds 200",
        "all four tools to the end of the list: on 26 November their time ended with the wide kernels, and 4-bit "
        "weights x e4m3 have another kernel since (`--only w4a8,int4-fp8`); racecheck reports hand-overs that it does "
        "not follow",
        "--seconds 1",
    ),
)  # fmt: skip


def table() -> list[str]:
    """The steps as the rows of TUNING.md's table."""
    rows = ["| minutes | step | command | what it decides |", "| --- | --- | --- | --- |"]
    for step in STEPS:
        after = f" (after {', '.join(step.after)})" if step.after else ""
        gpus = f", {step.gpus} GPUs" if step.gpus > 1 else ""
        rows.append(f"| {step.minutes:g}{gpus} | {step.name}{after} | `{step.command}` | {step.decides} |")
    return rows
