"""Reproduction of papers: the published fits (`published`), where a decoding step's time goes (`breakdown`)."""
