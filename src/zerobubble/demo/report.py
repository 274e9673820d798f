"""What the demo shows: one row per schedule, as a table, as JSON and as pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from zerobubble.generators import find_generator
from zerobubble.plot import save
from zerobubble.runtime import measured_costs
from zerobubble.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerobubble.demo.training import DemoConfig, ScheduleRun
    from zerobubble.timeline import Timeline

_MIB = 2**20
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Row:
    """One schedule in figures. Times in seconds, memory in bytes per rank, losses in nats per byte of text."""

    schedule: str
    tokens_per_second: float
    step_seconds: float
    step_time_ratio: float
    bubble_rate_predicted: float
    bubble_rate_measured: float
    peak_memory_predicted: tuple[float, ...]
    peak_memory_measured: tuple[float, ...]
    training_loss: float
    held_out_loss: float


@dataclass(frozen=True)
class Report:
    """All that the demo found.

    Attributes:
        rows: one per schedule; the first is what the others are compared with.
        bit_identical: whether the loss of every step is the same, to the last bit, under every schedule.
        unigram_entropy: of the held-out text, in nats per byte.
        steps: training steps per schedule.
        source: where the text comes from.
    """

    rows: tuple[Row, ...]
    bit_identical: bool
    unigram_entropy: float
    steps: int
    source: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_report(runs: Sequence[ScheduleRun], config: DemoConfig, unigram_entropy: float, source: str) -> Report:
    """The figures of `runs`."""
    baseline = median(runs[0].step_seconds)
    return Report(
        rows=tuple(_row(run, baseline, config) for run in runs),
        bit_identical=all(run.losses == runs[0].losses for run in runs),
        unigram_entropy=unigram_entropy,
        steps=config.steps,
        source=source,
    )


def _row(run: ScheduleRun, baseline: float, config: DemoConfig) -> Row:
    predicted = _predicted(run)
    step_seconds = median(run.step_seconds)
    return Row(
        schedule=find_generator(run.schedule.name).title,
        tokens_per_second=config.samples * config.model.context / step_seconds,
        step_seconds=step_seconds,
        step_time_ratio=step_seconds / baseline,
        bubble_rate_predicted=predicted.bubble_rate,
        bubble_rate_measured=median(timeline.bubble_rate for timeline in _warm(run)),
        peak_memory_predicted=predicted.peak_memory,
        peak_memory_measured=run.memory.peaks,
        training_loss=run.losses[-1],
        held_out_loss=run.held_out_loss,
    )


def _warm(run: ScheduleRun) -> list[Timeline]:
    return run.timelines[_WARM_UP_STEPS:] or run.timelines


def _predicted(run: ScheduleRun) -> Timeline:
    """The schedule simulated with the op times, latencies and memories that it was measured to have."""
    return simulate(run.schedule, measured_costs(_warm(run), run.memory))


def table(report: Report) -> Table:
    """The report as a table, with what it means beneath."""
    identical = "bit-identical" if report.bit_identical else "NOT identical"
    drawn = Table(
        title=f"{report.steps} training steps per schedule, in alternating blocks",
        caption=(
            f"Losses in nats per byte; byte-unigram entropy of the held-out text: {report.unigram_entropy:.3f}. "
            f"The loss of every step is {identical} over the schedules."
        ),
    )
    drawn.add_column("schedule")
    for name in (
        "tokens/s", f"step time\n/ {report.rows[0].schedule}'s", "bubble\npredicted", "bubble\nmeasured",
        "peak MiB per rank\npredicted", "peak MiB per rank\nmeasured", "training\nloss", "held-out\nloss",
    ):  # fmt: skip
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        drawn.add_row(
            row.schedule,
            f"{row.tokens_per_second:,.0f}",
            f"{row.step_time_ratio:.3f}",
            f"{row.bubble_rate_predicted:.1%}",
            f"{row.bubble_rate_measured:.1%}",
            _mib(row.peak_memory_predicted),
            _mib(row.peak_memory_measured),
            f"{row.training_loss:.4f}",
            f"{row.held_out_loss:.4f}",
        )
    return drawn


def _mib(sizes: Sequence[float]) -> str:
    return " ".join(f"{size / _MIB:.1f}" for size in sizes)


def draw(runs: Sequence[ScheduleRun], folder: Path) -> list[Path]:
    """Write `<schedule>.svg` (a measured step above its simulation) and `timelines.svg` (all measured ones)."""
    folder.mkdir(parents=True, exist_ok=True)
    typical = [(find_generator(run.schedule.name).title, _typical(_warm(run)), run) for run in runs]
    files = []
    for title, measured, run in typical:
        files.append(folder / f"{run.schedule.name}.svg")
        simulated = replace(_predicted(run), peak_memory=())  # bytes would read badly in a caption
        save([(f"{title}, measured", measured), (f"{title}, simulated with the measured times", simulated)], files[-1])
    files.append(folder / "timelines.svg")
    save([(f"{title}, measured", measured) for title, measured, _ in typical], files[-1])
    return files


def _typical(timelines: Sequence[Timeline]) -> Timeline:
    """The step with the median cost."""
    return sorted(timelines, key=lambda timeline: timeline.cost)[len(timelines) // 2]
