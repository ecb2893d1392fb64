"""The decoding loop of rows of different lengths, and the objects that it drives."""
