"""From logits to committed tokens: processors, noise, acceptance, stopping."""
