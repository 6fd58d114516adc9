"""Triton kernels of the runner; imported only where they run."""
