"""Random numbers by position: jump a generator anywhere, know what an operator draws, keep streams."""
