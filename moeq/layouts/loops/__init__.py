"""Compiled loops of the layouts. Import only after `moeq.layouts.words.have_numba` has said yes.

`<name>.py` is what others call, `<name>_loops.py` the loops, in numba; `native` runs them, `compiler` compiles them.
"""
