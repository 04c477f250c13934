"""Axes, the wires behind them, lanes beside them and the ledger of what they carried."""

from weft.comm.axis import Axis
from weft.comm.launch import launch
from weft.comm.layout import shard, unshard
from weft.comm.ledger import Ledger, record
from weft.comm.machine import Machine
from weft.comm.virtual import Run, VirtualWorld
from weft.comm.wire import Pending

__all__ = ["Axis", "Ledger", "Machine", "Pending", "Run", "VirtualWorld", "launch", "record", "shard", "unshard"]
