"""Turns logits into committed tokens: processors, noise, acceptance, stopping."""
