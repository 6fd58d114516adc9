"""GPU kernels of the rules, in Triton. Imported only where they run: on CUDA, or in Triton's interpreter."""
