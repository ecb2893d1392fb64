"""The policy's modules as the engine runs them: other attention, products and layers over the same weights."""
