"""Support for the tests and benchmarks of `moeq_kernels`: packed layers, a float32 reference, kernels run on a CPU.

Nothing here imports the readers of the packed words: layouts come from closed forms of their own (`packing`).
Commands outside pytest need this folder's parent on the path: `PYTHONPATH=.:kernels:tests/moeq_kernels`.
"""
