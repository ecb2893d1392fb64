"""Plans drafters on other threads and ranks as SpecActor does: see README.md."""
