"""Types shared by all kernels."""
