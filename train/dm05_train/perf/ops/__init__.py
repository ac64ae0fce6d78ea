"""Fused operations of the accelerated layers: Triton kernels, each with its plain-torch twin.

Each operation dispatches by device: the kernel on a GPU, the twin elsewhere; the tests pin the two together, gradients
included, in Triton's interpreter.
"""
