"""Triton kernels that operations over chunks share: launches, operators, blocks; Triton is imported at a launch."""
