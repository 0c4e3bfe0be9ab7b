"""Seam 2: what autograd and Python touch behind the dispatcher.

Some things never reach a dispatch mode: constructors of tensor subclasses, assignments to ``.data``
of real tensors, the initialisation of CUDA while arguments are parsed. They are patched while a
recording or fake mode is active anywhere in the process, by one holder that counts its users and
restores everything when the last one leaves; each patch asks whether its own thread is recording.
The rungs also say how a fake object becomes a real one.
"""

from __future__ import annotations

import threading
from typing import Any

from torchcompat import _gate

LADDER: _gate.Ladder = (
    ((1, 13), "since_1_13"),
    ((2, 0), "since_2_0"),
    ((2, 3), "since_2_3"),
    ((2, 4), "since_2_4"),
    ((2, 12), "since_2_12"),
)

_rung = _gate.load(__name__, LADDER)

become = _rung.become
hand_over = _rung.hand_over
mode_key = _rung.mode_key
quiet = _rung.quiet

_lock = threading.Lock()
_users = 0
_saved: list[tuple[Any, str, Any, bool]] = []


def enter(recorder: Any) -> None:
    """Apply the running release's patches, unless somebody already did."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for owner, name, replacement in _rung.patches(recorder):
            own = name in vars(owner)
            _saved.append((owner, name, vars(owner)[name] if own else None, own))
            setattr(owner, name, replacement)
        _rung.switch(True)


def leave() -> None:
    """Take back what ``enter`` did, when the last user leaves."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        _rung.switch(False)
        while _saved:
            owner, name, original, own = _saved.pop()
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
