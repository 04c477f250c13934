"""What torch's meshes, wrappers, checkpoints and rendezvous need, beside the axes of `weft.comm`."""
