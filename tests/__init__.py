"""The tests of torchcompat: the oracle is eager construction in the same process."""
