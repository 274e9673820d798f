"""Models as lists of layers. Needs torch."""

from zerobubble.models.gpt import GPTConfig, gpt_layers, gpt_partition, next_token_loss

__all__ = ["GPTConfig", "gpt_layers", "gpt_partition", "next_token_loss"]
