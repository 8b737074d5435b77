"""Device code. Importing these modules needs triton; the host side imports them on first use."""
