"""Random numbers by position: jumping ahead, knowing what operators draw, keeping streams."""
