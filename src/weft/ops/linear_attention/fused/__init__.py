"""Fused kernels of linear attention in Triton, in the phases of the torch kernels; Triton is imported at a launch."""
