"""How the project is put together: what must hold whatever the package computes."""
