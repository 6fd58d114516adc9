"""Triton kernels of layers: norms, products, attention. Imported only where Triton runs."""
