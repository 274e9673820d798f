"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing, in a file that reads back as timelines."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobubble import notation
from zerobubble.costs import SECONDS
from zerobubble.dependencies import needs, result
from zerobubble.errors import NotationError
from zerobubble.plot.layout import Panel, panels
from zerobubble.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.op import Op
    from zerobubble.plot.layout import Box

_Event = dict[str, Any]


def trace(timelines: Sequence[tuple[str, Timeline]]) -> dict[str, Any]:
    """The timelines as an object in the Trace Event Format.

    Each timeline is a process (`pid` is its index), each rank a thread of it, each op a complete event (`ph` "X") named
    as in the notation, with stage, chunk and microbatch in its `args`. An arrow (`ph` "s" and "f") leads from each op
    to the op on another rank that needs its result. Times count from the timeline's first op, in microseconds; a
    timeline whose unit is not s, ms, us or ns has 1 unit = 1 microsecond. All are rounded to nanoseconds, which is
    what the viewers hold. Beside `traceEvents` stand the `timelines` as `to_dict` gives them, which viewers ignore.

    Raises:
        OptionError: no timeline.
    """
    events: list[_Event] = []
    flows = count(1)
    drawn = panels(timelines)
    for pid, panel in enumerate(drawn):
        scale = round(SECONDS.get(panel.timeline.unit, 1e-6) * 1e9) / 1e3
        boxes = {box.op: box for rank in range(len(panel.timeline.starts)) for box in panel.boxes(rank)}
        events += _names(pid, panel)
        events += (_op(pid, box, scale) for box in boxes.values())
        for producer, consumer in _messages(panel, boxes):
            events += _arrow(pid, next(flows), producer, consumer, scale)
    whole = [to_dict(panel.title, panel.timeline) for panel in drawn]
    return {"displayTimeUnit": "ms", "traceEvents": events, "timelines": whole}


def to_json(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """The text of a trace file. Raises `OptionError` when there is no timeline."""
    return json.dumps(trace(timelines), separators=(",", ":"))


def to_dict(title: str, timeline: Timeline) -> dict[str, Any]:
    """A timeline as an object for JSON; `read` takes it back. Times count from the first op, in the timeline's unit."""
    origin = Panel(title, timeline).origin
    return {
        "title": title,
        "schedule": notation.to_dict(timeline.schedule),
        "unit": timeline.unit,
        "starts": [[start - origin for start in row] for row in timeline.starts],
        "ends": [[end - origin for end in row] for row in timeline.ends],
        "cost": timeline.cost,
        "bubble_rate": timeline.bubble_rate,
        "peak_memory": list(timeline.peak_memory),
        "hop": list(timeline.hop),
    }


def holds_timelines(path: str | Path) -> bool:
    """Whether this is a JSON file that `read` is for, and not a schedule."""
    path = Path(path)
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and not {"timelines", "traceEvents"}.isdisjoint(data)


def read(path: str | Path) -> list[tuple[str, Timeline]]:
    """The timelines in a file, with their titles: a trace written by `save`, or what `zerobubble show --json` printed.

    Raises:
        NotationError: the file cannot be read, holds no timelines, or one of them is malformed; names the place.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotationError(f"{path}: cannot be read as timelines: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("timelines"), list):
        raise NotationError(
            f'{path}: holds no "timelines"; write it with `-o {Path(path).name}` of emulate or show, or by plot.save'
        )
    return [_timeline(one, f"{path}, timeline {i}") for i, one in enumerate(data["timelines"])]


def _timeline(data: Any, where: str) -> tuple[str, Timeline]:
    try:
        schedule = notation.from_json(json.dumps(data["schedule"]))
        starts, ends = _rows(data["starts"]), _rows(data["ends"])
        peak, hop = _numbers(data.get("peak_memory", ())), _numbers(data.get("hop", ()))
        timeline = Timeline(schedule, starts, ends, peak, str(data["unit"]), hop)
    except NotationError as error:
        raise NotationError(f'{where}, "schedule": {error}') from None
    except (KeyError, TypeError, ValueError) as error:
        raise NotationError(f"{where}: needs schedule, unit, starts and ends; got {error!r}") from None
    sizes = [len(order) for order in schedule.orders]
    for key, rows in (("starts", starts), ("ends", ends)):
        if (got := [len(row) for row in rows]) != sizes:
            raise NotationError(f'{where}, "{key}": needs one number per op, so per rank {sizes}; got {got}')
    return str(data.get("title", schedule.name)), timeline


def _rows(value: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(_numbers(row) for row in value)


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in value)


def _names(pid: int, panel: Panel) -> Iterator[_Event]:
    def metadata(name: str, tid: int, args: dict[str, object]) -> _Event:
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}

    yield metadata("process_name", 0, {"name": f"{panel.title} ({panel.caption})"})
    yield metadata("process_sort_index", 0, {"sort_index": pid})
    for rank in range(len(panel.timeline.starts)):
        yield metadata("thread_name", rank, {"name": f"rank {rank}"})
        yield metadata("thread_sort_index", rank, {"sort_index": rank})


def _op(pid: int, box: Box, scale: float) -> _Event:
    start, end = round(box.start * scale, 3), round(box.end * scale, 3)
    return {
        "ph": "X",
        "name": str(box.op),
        "cat": box.op.kind.value,
        "pid": pid,
        "tid": box.rank,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {"stage": box.op.stage, "chunk": box.chunk, "microbatch": box.op.microbatch},
    }


def _messages(panel: Panel, boxes: dict[Op, Box]) -> Iterator[tuple[Box, Box]]:
    """Producer and consumer of every result that crosses ranks."""
    schedule = panel.timeline.schedule
    producers = {result(op): box for op, box in boxes.items()}
    for op, box in boxes.items():
        for need in needs(op, schedule.num_stages):
            producer = producers.get(need)
            if producer is not None and producer.rank != box.rank:
                yield producer, box


def _arrow(pid: int, flow: int, producer: Box, consumer: Box, scale: float) -> tuple[_Event, _Event]:
    """The two ends of an arrow. Viewers tie an end to the event around its time, so it stands in the middle of it."""

    def event(phase: str, box: Box) -> _Event:
        middle = round((box.start + box.end) / 2 * scale, 3)
        common = {"name": "message", "cat": "message", "id": flow, "pid": pid, "tid": box.rank, "ts": middle}
        return {"ph": phase, **common}

    return event("s", producer), {**event("f", consumer), "bp": "e"}
