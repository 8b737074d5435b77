"""Device code, written in Gluon. Importing these modules needs triton."""
