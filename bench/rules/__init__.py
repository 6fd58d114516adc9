"""The parts of `bench.recurrence`: kernels of the linear rules on a GPU beside floors and other libraries."""
