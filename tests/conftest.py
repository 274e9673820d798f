"""What all tests share: golden files, commands run in this process, and how hard Hypothesis tries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from zerobubble import cli

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile(
    "everyday",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,  # there the same examples each time
)
settings.register_profile("thorough", settings.get_profile("everyday"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden, then look at git diff"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` must be what tests/golden/<name> holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is not there; write it with: pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), "if the change is meant: pytest --update-golden"

    return check


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must succeed and return what it printed."""

    def run(*arguments: str) -> str:
        status = cli.main(arguments)
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command that must fail; return exit status and message."""

    def fail(*arguments: str) -> tuple[int, str]:
        status = cli.main(arguments)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        return status, err.removeprefix("error: ")

    return fail
