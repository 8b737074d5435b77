"""Compiled loops of the layouts. Import only where numba is installed (`moeq.layouts.words.have_numba`)."""
