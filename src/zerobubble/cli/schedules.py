"""`zerobubble schedules`: the table of generators."""

from typing import Any

from rich.table import Table

from zerobubble.cli.inputs import AsJson
from zerobubble.cli.output import console, print_json
from zerobubble.generators import GENERATORS, Generator

_COLUMNS = ("name", "title", "placement", "bubble", "memory", "good for")


def schedules(as_json: AsJson = False) -> None:
    """The schedules that can be generated: what each needs and is good for."""
    if as_json:
        print_json({"schedules": [_to_dict(generator) for generator in GENERATORS.values()]})
        return
    table = Table(*_COLUMNS)
    for generator in GENERATORS.values():
        table.add_row(*(str(value) for value in _to_dict(generator).values()))
    out = console()
    out.print(table)
    out.print(
        "p ranks, m microbatches, v chunks per rank; T_F, T_B, T_W times of a rank's ops, M_B memory of one forward"
    )


def _to_dict(generator: Generator) -> dict[str, Any]:
    return {
        "name": generator.name,
        "title": generator.title,
        "placement": generator.placement,
        "bubble": generator.bubble,
        "memory": generator.memory,
        "good_for": generator.good_for,
    }
