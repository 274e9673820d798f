"""The small GPT of the demo: a byte-level language model as a list of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from zerobubble.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults have about 3 million parameters."""

    vocabulary: int = 256
    context: int = 128
    width: int = 256
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.1


class Embedding(nn.Module):
    """Tokens [batch, length] -> [batch, length, width]: token plus learned position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return embedded


class Block(nn.Module):
    """A pre-norm transformer block: [batch, length, width] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with a residual connection."""
        x = x + self._drop(self._attention(self.attention_norm(x)))
        return x + self._drop(self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.query_key_value(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """[batch, length, width] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


def gpt_layers(config: GPTConfig) -> list[Callable[[], nn.Module]]:
    """Functions that make the layers of a GPT: embedding, blocks, head."""
    return [partial(Embedding, config), *[partial(Block, config)] * config.blocks, partial(Head, config)]


def gpt_partition(config: GPTConfig, num_stages: int) -> list[int]:
    """Layers per stage with the blocks spread evenly: the embedding joins the first stage, the head the last.

    Raises:
        OptionError: there are fewer blocks than stages.
    """
    if config.blocks < num_stages:
        raise OptionError(f"a GPT of {config.blocks} blocks cannot be cut into {num_stages} stages; raise `blocks`")
    size, rest = divmod(config.blocks, num_stages)
    partition = [size + (stage < rest) for stage in range(num_stages)]
    partition[0] += 1
    partition[-1] += 1
    return partition


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token. Logits [batch, length, vocabulary], targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
