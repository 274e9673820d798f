"""README, docs and examples say what is true: their code runs, and prints what stands beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
EXAMPLES = sorted(path.with_suffix(".py").name for path in (ROOT / "examples").glob("*.out"))


def run(*command, cwd, **options):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_block_after_block(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    if not blocks:
        return
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    done = run(sys.executable, "page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_stands_beside_it(name, tmp_path):
    done = run(sys.executable, str(ROOT / "examples" / name), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "examples" / name).with_suffix(".out").read_text(encoding="utf-8")


def test_train_gpt_runs_under_torchrun_and_continues_from_its_checkpoint(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "train_gpt.py"), "--microbatches", "2", "--samples", "2"]
    data = ["--data", str(ROOT / "LICENSE")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    auto = ["--steps", "8", "--schedule", "auto", "--save", "state.pt"]
    first = run(*torchrun, *script, *data, *auto, cwd=tmp_path, env=env)
    assert first.returncode == 0, first.stderr
    assert re.search("step 7: (going on|staying) with ", first.stderr)
    assert "held-out" in first.stdout
    again = ["--steps", "2", "--schedule", "zb_v", "--load", "state.pt"]
    second = run(*torchrun, *script, *data, *again, cwd=tmp_path, env=env)
    assert second.returncode == 0, second.stderr


def test_the_demo_trains_all_four_schedules_bit_identically_and_writes_its_pictures(tmp_path):
    demo = [
        sys.executable,
        "-m",
        "zerobubble",
        "demo",
        "--steps",
        "3",
        "--microbatches",
        "2",
        "--data",
        str(ROOT / "LICENSE"),
    ]
    done = run(*demo, "--out", "pictures", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bit-identical over the schedules" in " ".join(done.stdout.split())
    assert all(title in done.stdout for title in ("1F1B", "ZB-H1", "ZB-H2", "ZB-V"))
    written = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert written >= {"timelines.svg", "zb_h1.svg", "zb_h2.svg", "zb_v.svg", "one_f_one_b.svg", "report.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "zb_h9"], "no schedule is called 'zb_h9'"),
        (["--schedules", ","], "needs one or more different names"),
        (["--data", "nowhere"], "there is no file or folder nowhere"),
        (["--ranks", "0"], "ranks"),
    ],
)
def test_the_demo_refuses_wrong_options_before_it_starts(arguments, message, tmp_path):
    done = run(sys.executable, "-m", "zerobubble", "demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
