"""Fused kernels of the delta rule in Triton, in the phases of the torch kernels; Triton is imported at a launch."""
