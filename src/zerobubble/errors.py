"""The exceptions that users meet. Each message names the thing, the rule, what was got and the way out.

    ZeroBubbleError
    ├── OptionError          an argument or option is out of range
    ├── ScheduleError        a schedule breaks a rule (`faults` lists every place)
    ├── NotationError        a text, CSV or JSON file cannot be read as a schedule
    ├── CostsError           a costs file or a `Costs` value is malformed
    ├── MissingExtraError    an optional dependency is not installed
    └── PipelineError        something went wrong while a pipeline ran
        ├── PeerError        another rank failed, died or kept us waiting too long
        └── ShapeError       tensors changed shape or dtype between steps

`except ZeroBubbleError` catches them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerobubble.validate import Fault


class ZeroBubbleError(Exception):
    """Base of every error that this library raises on purpose."""


class OptionError(ZeroBubbleError, ValueError):
    """An argument or a command-line option has a value that cannot be used."""


class ScheduleError(ZeroBubbleError, ValueError):
    """A schedule breaks a rule. `faults` lists every place, worst first."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class NotationError(ZeroBubbleError, ValueError):
    """A file or string cannot be read as a schedule."""


class CostsError(ZeroBubbleError, ValueError):
    """A costs file or `Costs` value is malformed; the message names the key and the stage."""


class MissingExtraError(ZeroBubbleError, ImportError):
    """A feature needs an optional dependency; the message says what to install."""


class PipelineError(ZeroBubbleError, RuntimeError):
    """Something went wrong while a pipeline ran."""


class PeerError(PipelineError):
    """Another rank failed, died, or kept this one waiting past the timeout."""


class ShapeError(PipelineError):
    """Tensors changed shape or dtype between steps without `dynamic_shapes=True`."""
