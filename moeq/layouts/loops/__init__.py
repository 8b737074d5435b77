"""Compiled loops of the layouts. Import them only after `moeq.layouts.words.have_numba` has returned True.

Others call `<name>.py`; the loops are in `<name>_loops.py`, for numba. `native` runs them, `compiler` compiles them.
"""
