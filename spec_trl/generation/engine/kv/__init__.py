"""Memory of rows: K/V, recurrent states, pages, and how many rows fit."""
