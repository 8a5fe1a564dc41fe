"""Numbers of a run for TensorBoard, where tensorboardX is installed."""

import importlib.util
import math
import time
from pathlib import Path

_SECONDS = 10  # until TensorBoard can see what was measured


def opened(folder: Path, start: int) -> "Board | None":
    """A writer if tensorboardX is installed, else None."""
    if importlib.util.find_spec("tensorboardX") is None:
        return None
    return Board(folder / "tensorboard", start)


class Board:
    """Events for TensorBoard; those after ``start`` take the place of an earlier run's.

    Not by `tensorboardX.SummaryWriter`: its thread ends where the disk is full, and a
    run would wait for it for ever.
    """

    def __init__(self, folder: Path, start: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        begin = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(step=start + 1, session_log=begin))
        self._flushed = -math.inf

    def add(self, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            event = self._event(step=step, wall_time=time.time())
            event.summary.CopyFrom(self._scalar(name, value))
            self._writer.write_event(event)
        if time.monotonic() > self._flushed + _SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()
