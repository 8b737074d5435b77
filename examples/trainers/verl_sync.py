"""verl sends a trainer's weights to a vLLM worker that serves converted experts: `python verl_sync.py`.

Both ends are verl's own and call what they call in a run: `BucketedWeightSender.async_send_weights` beside the trainer,
`vLLMColocateWorkerExtension.update_weights_from_ipc` in vLLM's worker. Buckets of bf16 tensors go through shared memory
and reach the model's `load_weights`, where moeq quantises and writes the experts in place. Needs `vllm` and `verl`.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import torch
from small_model import check, converted_checkpoint, trained_weights
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm_server import ModelRunner

os.environ["VERL_PLATFORM"] = "cpu"


@PlatformRegistry.register(platform="cpu")
class OnCPU(PlatformCUDA):
    """Platform that verl lacks: nothing has to be waited for, and no memory is shared by CUDA's handles."""

    device_name = "cpu"
    device_module = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def is_ipc_supported(self) -> bool:
        return False


class Worker(vLLMColocateWorkerExtension):
    """What verl's extension needs of the worker that vLLM mixes it into (`worker_extension_cls`)."""

    def __init__(self, *, runner: ModelRunner, handle: str) -> None:
        self.model_runner, self.device, self.local_rank = runner, torch.device("cpu"), 0
        self._handle = handle

    def _get_zmq_handle(self) -> str:
        return self._handle


def sync(runner: ModelRunner, weights: Iterable[tuple[str, torch.Tensor]], scratch: Path) -> None:
    """Send weights from a thread, in the place of the trainer's process, and receive them in the worker."""
    worker = Worker(runner=runner, handle=f"ipc://{scratch}/weights")
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    trainer = Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights))))
    trainer.start()
    worker.update_weights_from_ipc(use_shm=True)
    trainer.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = converted_checkpoint(Path(scratch))
        runner = ModelRunner(folder, Path(scratch))
        sync(runner, trained_weights(folder), Path(scratch))
        check(folder, runner.experts)
