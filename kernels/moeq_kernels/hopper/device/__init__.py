"""Device code for Hopper: Gluon (matrix products) and Triton (routing and sums)."""
