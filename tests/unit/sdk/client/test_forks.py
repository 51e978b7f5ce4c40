from __future__ import annotations

import gc

from mqmesh.sdk.client import forks


class Listener:
    def __init__(self) -> None:
        self.told = 0

    def on_fork(self) -> None:
        self.told += 1


def test_everybody_who_still_lives_is_told(monkeypatch) -> None:
    monkeypatch.setattr(forks, "_listeners", type(forks._listeners)())
    one, two = Listener(), Listener()
    forks.call_in_forks(one.on_fork)
    forks.call_in_forks(two.on_fork)
    forks._call_listeners()
    del two
    gc.collect()
    forks._call_listeners()
    assert one.told == 2
    assert len(forks._listeners) == 1
