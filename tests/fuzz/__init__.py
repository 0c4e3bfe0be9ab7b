"""Random constructor programs, run eagerly and deferred, that must come out the same."""
