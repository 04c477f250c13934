"""`weft check-device`: every operation on an accelerator, compared with the CPU."""
