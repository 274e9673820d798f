"""The paper's printed figures (`facts.json`), those of its authors' code (`peers.json`), and ours beside them.

Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, arXiv 2401.10241v1.
"""

from __future__ import annotations

import ast
import json
import operator
from functools import cache
from importlib.resources import files
from typing import Any

from zerobubble.costs import Costs

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@cache
def facts() -> dict[str, Any]:
    """Figures and formulas of the paper; `source` says of which version."""
    return _load("facts.json")


@cache
def peers() -> dict[str, Any]:
    """Bubble rates that the paper authors' code reaches with the times of table 9; `source` says how they were got."""
    return _load("peers.json")


def profiles() -> dict[str, dict[str, Any]]:
    """Table 9: the times of each setting (`1.5B/p8/m24`), in ms, with its `model`, `p` and `m`."""
    table: dict[str, dict[str, Any]] = facts()["table_9_profiled_times_ms"]
    return table


def profiled_costs(profile: str) -> Costs:
    """Table 9's times of one setting, for one chunk per rank; memory as table 1 has it, with M_B = 1."""
    times = profiles()[profile]
    model = facts()["table_3_models"][times["model"]]
    sizes = {"a": model["heads"], "s": model["sequence"], "b": model["microbatch_size"], "h": model["hidden"]}
    formulas = facts()["table_1_per_layer"]["activation_bytes"]
    return Costs(
        forward=times["T_F"],
        backward_input=times["T_B"],
        backward_weight=times["T_W"],
        communication=times["T_comm"],
        weight_memory=evaluate(formulas["M_W"], sizes) / evaluate(formulas["M_B"], sizes),
        unit="ms",
    )


def evaluate(formula: str, values: dict[str, float]) -> float:
    """The value of one of the paper's formulas: numbers, names from `values`, `+ - *` and parentheses."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return float(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        raise ValueError(f"{formula!r} has more in it than numbers, names, + - * and parentheses")

    return value(ast.parse(formula, mode="eval").body)


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
    return data
