"""Who goes first, who is shed, and that nothing is kept of those who left."""

from __future__ import annotations

import pytest

from controlplane.gateway.waiting import BANDS, RoomIsFull, WaitingRoom


def called(*waiters) -> list[bool]:
    return [waiter.called.is_set() for waiter in waiters]


def test_the_higher_band_goes_first_and_in_it_who_waits_longest() -> None:
    room = WaitingRoom(most_requests=10, most_bytes=100)
    low, first, second, high = (room.enter("e", 1, BANDS[band]) for band in ("low", "normal", "normal", "high"))
    room.call("e", 2)
    assert called(low, first, second, high) == [False, True, False, True]
    room.leave("e", high)
    room.leave("e", first)
    room.call("e", 5)
    assert called(low, second) == [True, True]


def test_a_full_room_sheds_the_last_of_the_lowest_band() -> None:
    room = WaitingRoom(most_requests=3, most_bytes=100)
    waiters = [room.enter("e", 1, BANDS[band]) for band in ("low", "low", "normal")]
    room.enter("e", 1, BANDS["high"])
    assert [waiter.is_shed for waiter in waiters] == [False, True, False]
    assert waiters[1].called.is_set()
    with pytest.raises(RoomIsFull):
        room.enter("e", 1, BANDS["low"])
    room.enter("e", 1, BANDS["normal"])
    with pytest.raises(RoomIsFull):
        room.enter("e", 1, BANDS["normal"])
    assert room.count("e") == 3


def test_bytes_are_bounded_over_all_and_given_back_once() -> None:
    room = WaitingRoom(most_requests=10, most_bytes=10)
    big = room.enter("e", 9, BANDS["low"])
    with pytest.raises(RoomIsFull):
        room.enter("f", 5, BANDS["high"])
    room.enter("e", 5, BANDS["high"])
    assert big.is_shed
    room.leave("e", big)
    room.enter("f", 5)
    assert room.endpoints() == ["e", "f"]
    with pytest.raises(RoomIsFull):
        room.enter("g", 1)
    assert room.endpoints() == ["e", "f"]
