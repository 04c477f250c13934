"""Axes and the calls made on them, the wires behind them, lanes beside them and the ledger of what they carried."""

from weft.comm.axis import Axis
from weft.comm.call import Call
from weft.comm.ledger import Ledger, record
from weft.comm.rounds import Path
from weft.comm.wire import Pending

__all__ = ["Axis", "Call", "Ledger", "Path", "Pending", "record"]
