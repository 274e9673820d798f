"""Real text for the demo: bytes of files, split in training and held-out, cut into batches by step number."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerobubble.errors import OptionError

_HELD_OUT = 0.1
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Text:
    """Bytes of text: `train` and `held_out` [n] of uint8, and where they come from."""

    train: Tensor
    held_out: Tensor
    source: str

    def unigram_entropy(self) -> float:
        """Entropy of the held-out bytes taken one by one, in nats: what a model without context cannot beat."""
        counts = torch.bincount(self.held_out.long(), minlength=256).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    def batch(self, step: int, samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets [samples, length] of training step `step`, the same on every rank."""
        return _windows(self.train, torch.Generator().manual_seed(seed * 1_000_003 + step), samples, length)

    def held_out_batch(self, index: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [samples, length] for evaluation."""
        return _windows(self.held_out, torch.Generator().manual_seed(index), samples, length)


def load_text(path: Path | None = None, context: int = 128) -> Text:
    """Read a file, or all files of a folder; by default the source of the installed Python standard library.

    The last tenth is held out. Of more than 32 MiB the first 32 are taken.

    Raises:
        OptionError: there is nothing to read, or too little for one window of `context` tokens.
    """
    root = path or Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for file in _files(root, path is None):
        data += file.read_bytes()
        if len(data) >= _MOST_BYTES:
            break
    least = int((context + 2) / _HELD_OUT) + 1
    if len(data) < least:
        raise OptionError(f"{root}: needs at least {least} bytes of text for a context of {context}; got {len(data)}")
    all_bytes = torch.frombuffer(data[:_MOST_BYTES], dtype=torch.uint8)
    cut = int(len(all_bytes) * (1 - _HELD_OUT))
    return Text(all_bytes[:cut], all_bytes[cut:], str(root))


def _files(root: Path, python_only: bool) -> list[Path]:
    try:
        if root.is_file():
            return [root]
        pattern = "*.py" if python_only else "*"
        files = sorted(file for file in root.rglob(pattern) if file.is_file() and "site-packages" not in file.parts)
    except OSError as error:
        raise OptionError(f"{root}: cannot be read: {error}") from None
    if not files:
        raise OptionError(f"{root}: no file to read there; give a file or a folder of text")
    return files


def _windows(data: Tensor, generator: torch.Generator, samples: int, length: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - length, (samples,), generator=generator)
    windows = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
