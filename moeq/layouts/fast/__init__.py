"""Compiled loops of the layouts. Import only after `moeq.layouts.words.have_numba` has said yes."""
