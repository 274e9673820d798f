"""Rewrites the blocks of the README and the docs that are made from the code; with --check, says what is out of date.

python docs/generate.py [--check]

A block stands between `<!-- generated: NAME ARGUMENTS -->` and `<!-- end -->`; `BLOCKS` below says what makes it.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zerobubble as zb
from zerobubble.paper import profiled_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"(<!-- generated: (\w+)([^\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def schedules() -> Iterator[str]:
    """The table of generators."""
    rows = [(f"`{g.name}`", g.title, g.placement, g.bubble, g.memory, g.good_for) for g in zb.GENERATORS.values()]
    return table(("name", "title", "placement", "bubble", "memory", "good for"), rows)


def picture(name: str) -> Iterator[str]:
    """A schedule's picture, and its row of the table in words."""
    generator = zb.GENERATORS[name]
    yield f"![{generator.title}: 4 ranks, 8 microbatches](images/{name}.svg)"
    yield ""
    yield f"`{name}`: {generator.placement} placement; bubble {generator.bubble}; memory {generator.memory}."


SETTINGS: dict[str, tuple[int, zb.Costs]] = {
    "m = 8": (8, zb.Costs()),
    "m = 24": (24, zb.Costs()),
    "m = 64": (64, zb.Costs()),
    "T_B = 1.5, T_W = 0.5": (24, zb.Costs(backward_input=1.5, backward_weight=0.5)),
    "T_comm = 0.5": (24, zb.Costs(communication=0.5)),
    "profile of 6.2B": (24, profiled_costs("6.2B/p8/m24")),
}
"""Column of the table of bubble rates -> number of microbatches and costs of a rank's whole share."""


def rates() -> Iterator[str]:
    """Bubble rates and peak memory of every generator on 8 ranks."""
    rows = []
    for generator in zb.GENERATORS.values():
        timelines = [simulated(generator.name, m, costs) for m, costs in SETTINGS.values()]
        peak = f"{max(timelines[1].peak_memory):g}"
        rows.append((f"`{generator.name}`", peak, *(f"{timeline.bubble_rate:.1%}" for timeline in timelines)))
    return table(("", "peak memory, m = 24", *SETTINGS), rows)


def simulated(name: str, num_microbatches: int, costs: zb.Costs) -> zb.Timeline:
    """The timeline of a generator's schedule on 8 ranks; costs are of a rank, cut evenly into chunks."""
    schedule = zb.generate(name, 8, num_microbatches)
    return zb.simulate(schedule, costs.split(schedule.num_stages // schedule.num_ranks))


def api(module_name: str) -> Iterator[str]:
    """What a module offers, a line each; not the generators (they have a table), nor again what `zerobubble` offers."""
    module = import_module(module_name)
    for name in getattr(module, "__all__", None) or functions_of(module):
        value = getattr(module, name)
        elsewhere = name in zb.GENERATORS or (module is not zb and name in zb.__all__)
        if callable(value) and not elsewhere:
            yield f"- `{name}{parameters(value)}`: {summary(value)}"


def methods(path: str) -> Iterator[str]:
    """The public methods and properties of a class, a line each."""
    module, _, name = path.rpartition(".")
    cls = getattr(import_module(module), name)
    for method, value in vars(cls).items():
        if method.startswith("_"):
            continue
        if isinstance(value, (property, cached_property)):
            yield f"- `{method}`: {summary(value)}"
        elif isinstance(value, classmethod) or inspect.isfunction(value):
            yield f"- `{method}{parameters(getattr(cls, method))}`: {summary(value)}"


def docstring(module_name: str) -> Iterator[str]:
    """A module's docstring as it stands."""
    yield "```text"
    yield inspect.getdoc(import_module(module_name)) or ""
    yield "```"


BLOCKS: dict[str, Callable[..., Iterator[str]]] = {
    "schedules": schedules,
    "picture": picture,
    "rates": rates,
    "api": api,
    "methods": methods,
    "docstring": docstring,
}
"""Name of a block -> what makes its lines from its arguments."""


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"


def functions_of(module: ModuleType) -> list[str]:
    """The public functions that a module defines, in its order."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return [name for name, value in functions.items() if value.__module__ == module.__name__ and name[0] != "_"]


def parameters(value: Callable[..., Any]) -> str:
    """Names and defaults without types, as in `(schedule, costs=None)`; nothing for enumerations and exceptions."""
    if inspect.isclass(value) and issubclass(value, (Enum, Exception)):
        return ""
    signature = inspect.signature(value)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def summary(value: Any) -> str:
    """The first sentence of its docstring."""
    return re.split(r"(?<=\.)\s", " ".join(str(inspect.getdoc(value)).split()), maxsplit=1)[0]


def generated(page: str) -> str:
    """The text of a page with every block made anew."""

    def block(match: re.Match[str]) -> str:
        begin, name, arguments, end = match.groups()
        return begin + "\n".join(BLOCKS[name](*arguments.split())) + "\n" + end

    return _BLOCK.sub(block, page)


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is out of date")
    check = parser.parse_args().check
    stale = [page for page in PAGES if generated(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in stale:
        if check:
            sys.stderr.write(f"{page.relative_to(ROOT)} is out of date; run: python docs/generate.py\n")
        else:
            page.write_text(generated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
