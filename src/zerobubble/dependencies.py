"""The dependency rule between ops, written once. Validator, simulator, planner and lowering all ask here."""

from __future__ import annotations

from zerobubble.op import Kind, Op

_F, _B, _W, _BW = Kind.F, Kind.B, Kind.W, Kind.BW  # asked a million times; to look a member up in its enum is slow


def result(op: Op) -> Op:
    """The name under which others wait for `op`: an ordinary backward (BW) gives the same input gradient as a B."""
    return Op(op.stage, _B, op.microbatch) if op.kind is _BW else op


def needs(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The results that must be there before `op` may start, those of its own stage first.

    F needs the previous stage's F. B and BW need their own F and the next stage's input gradient.
    W needs its own B. Names are those of `result`: B stands for B or BW.
    """
    stage, kind, microbatch = op
    if kind is _F:
        return (Op(stage - 1, _F, microbatch),) if stage > 0 else ()
    if kind is _W:
        return (Op(stage, _B, microbatch),)
    own = Op(stage, _F, microbatch)
    return (own, Op(stage + 1, _B, microbatch)) if stage + 1 < num_stages else (own,)
