"""Memory of rows: K/V, states, pages, and how many rows fit."""
