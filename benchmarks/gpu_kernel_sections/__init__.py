"""Sections of `benchmarks.gpu_kernels`, one per file, and shared code, in the form of `benchmarks.gpu_sections`."""
