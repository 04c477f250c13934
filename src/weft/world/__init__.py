"""Worlds of ranks on one machine: virtual ones in one process, and local Gloo processes."""

from weft.world.launch import launch
from weft.world.machine import Machine
from weft.world.virtual import VirtualWorld, WorldRun

__all__ = ["Machine", "VirtualWorld", "WorldRun", "launch"]
