"""What a step sent, hid and exposed, as a table and as a trace."""

from __future__ import annotations

from pathlib import Path

from weft.optim.step.record import PartRow, StepRecord

_HEAD = ("part", "MB sent", "messages", "under way ms", "hidden ms", "exposed ms", "work ms")


class Explanation:
    """The last step on this rank. ``print`` it, or read ``rows`` and ``seconds``.

    A message is under way from its start until it is taken; exposed are those seconds of it that the rank stood
    waiting, hidden the others. Several are under way at once, so these do not add up to the step.
    """

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self.rows: list[PartRow] = record.rows()
        assert record.began is not None and record.ended is not None
        self.seconds = record.ended - record.began

    @property
    def exposed(self) -> float:
        """Seconds that the rank stood waiting."""
        return sum(row.exposed for row in self.rows)

    def __str__(self) -> str:
        lines = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        shown = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                 zip(line[1:], widths[1:], strict=True))]) for line in lines]  # fmt: skip
        return "\n".join([*shown, f"step {1e3 * self.seconds:.2f} ms, of it exposed {1e3 * self.exposed:.2f} ms"])

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace of the step (open it at ui.perfetto.dev): messages by axis, and work."""
        self._record.save_trace(path)


def _cells(row: PartRow) -> tuple[str, ...]:
    times = (row.under_way, row.hidden, row.exposed, row.work)
    return (row.part, f"{row.bytes_sent / 1e6:.3f}", str(row.messages), *(f"{1e3 * value:.2f}" for value in times))
