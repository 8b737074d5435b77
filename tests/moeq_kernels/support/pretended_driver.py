"""A CUDA driver that does nothing but count launches, and layers planned for a GPU whose calls go to it from a CPU.

It runs in a process of its own: the library takes the driver's name before anything loads the real one.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

#: A driver that does nothing: what `moeq_kernels.cuda` calls, and how many launches there were. Like a real one it
#: refuses what needs a context in a thread that has none, and code while somebody captures, but for a thread that is
#: relaxed about that.
DRIVER = """
#include <stdint.h>
#include <stddef.h>
static long launches, nodes; static int capturing, others_capture;
static __thread void *current; static __thread int mode;
long counted_launches(void) { return launches; }
void somebody_captures(int does) { others_capture = does; }
int cuModuleLoadData(void **module, const void *image) {
    if (!current || (others_capture && mode != 2)) return current ? 900 : 201;
    *module = (void *)image; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(1 + (long)device); return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
    launches++; return current ? 0 : 201; }
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const void *sizes, const void *strides,
    const void *box, const void *steps, int interleave, int swizzle, int promotion, int fill) {
    *(void **)map = address; return current ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)(16 + (long)flags); return 0; }
int cuStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamIsCapturing(void *stream, int *is) { *is = capturing; return 0; }
int cuThreadExchangeStreamCaptureMode(int *given) { int last = mode; mode = *given; *given = last; return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) { capturing = 1; nodes = launches; return 0; }
int cuStreamEndCapture(void *stream, void **graph) {
    capturing = 0; nodes = launches - nodes; launches -= nodes; *graph = (void *)3; return 0; }
int cuGraphGetNodes(void *graph, void **found, size_t *count) {
    if (found) for (size_t i = 0; i < *count; i++) found[i] = (void *)(100 + i);
    *count = nodes; return 0; }
int cuGraphGetEdges_v2(void *graph, void **from, void **to, void *data, size_t *count) {
    if (from) for (size_t i = 0; i < *count; i++) from[i] = (void *)(100 + i), to[i] = (void *)(101 + i);
    *count = nodes - 1; return 0; }
int cuGraphInstantiateWithFlags(void **run, void *graph, uint64_t flags) { *run = (void *)4; return 0; }
int cuGraphLaunch(void *run, void *stream) { launches++; return current ? 0 : 201; }
int cuGraphExecKernelNodeSetParams_v2(void *run, void *node, const void *params) { return 0; }
int cuGraphExecDestroy(void *run) { return 0; }
int cuGraphDestroy(void *graph) { return 0; }
"""


def driver(folder: Path) -> ctypes.CDLL:
    """Build the library, and load it under the driver's name."""
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    build = ["gcc", "-O2", "-shared", "-fPIC", "-w", folder / "driver.c", "-o", library, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(build, check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def take_cpu(layer: Any) -> None:
    """Make a layer that was planned on `meta` take tensors of the CPU and launch through the stand-in."""
    import torch

    from moeq_kernels import programs

    cpu = torch.device("cpu", 0)
    layer.device, layer._expected = cpu, (*layer._expected[:3], torch.device("cpu"))
    layer.is_direct, layer._program = True, programs.program_of(layer.family, layer.problem, 0, None, None)
    weights = {one: torch.empty(64, dtype=torch.uint8) for one in layer._program.weights}
    layer._tensors, layer.weight_addresses = weights, [one.data_ptr() for one in weights.values()]


def pretend_cuda() -> None:
    """Answer without a device what prepared calls ask torch about the current one."""
    import contextlib

    import torch

    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda index: 7  # type: ignore[attr-defined]
    torch.cuda.device = lambda index: contextlib.nullcontext()  # type: ignore[assignment,misc]
