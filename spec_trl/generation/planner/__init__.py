"""When to draft, with which drafter, and how far: plain Python without torch."""
