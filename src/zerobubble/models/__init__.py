"""Models as lists of layers. Needs torch."""

from zerobubble.models.gpt import GPTConfig, gpt_layers, next_token_loss

__all__ = ["GPTConfig", "gpt_layers", "next_token_loss"]
