# SPDX-License-Identifier: Apache-2.0
"""The handshake and sealed messages, without sockets."""

from __future__ import annotations

import struct

import pytest

from nccl_m2n.transport import handshake
from nccl_m2n.transport.handshake import Guest, Host, Letter, ProtocolError, Session
from tests.transport.fuzz_streams import fuzz


def test_wrong_byte_streams() -> None:
    """`python -m tests.transport.fuzz_streams` tries 100,000 of them."""
    told = fuzz(12_000, seed=7)
    outcomes = {
        "to_host": {"let in", "refused", "waits for more"},
        "to_guest": {"let in", "refused", "waits for more"},
        "to_session": {"all came", "refused", "waits for more"},
        "to_split": {"taken apart", "refused"},
        "to_link": {"all came", "refused", "waits for more"},
    }
    for target, expected in outcomes.items():
        assert {outcome for name, outcome in told if name == target} == expected


def sessions() -> tuple[Session, Session]:
    host, guest = Host(b"key", 0, lambda rank: handshake.WELCOME), Guest(b"key", 1, 0)
    guest.feed(host.feed(guest.feed(host.greeting())))
    assert host.session is not None
    assert guest.session is not None
    return host.session, guest.session


def test_a_length_is_believed_only_as_its_bytes_come() -> None:
    host, guest = sessions()
    host.feed(struct.pack("<BQ32s", 0, handshake.LARGEST_PAYLOAD, bytes(32)) + b"few")
    assert host.take() is None
    assert len(host._came) < 100
    guest.feed(struct.pack("<BQ32s", 0, handshake.LARGEST_PAYLOAD + 1, bytes(32)))
    with pytest.raises(ProtocolError, match=f"of {handshake.LARGEST_PAYLOAD + 1} bytes was announced"):
        guest.take()


def test_a_message_has_one_place_and_one_direction() -> None:
    host, guest = sessions()
    one = host.head(Letter.of(b"one")) + b"one"
    guest.feed(one)
    assert guest.take() == (handshake.MESSAGE, b"one")
    guest.feed(one)
    with pytest.raises(ProtocolError, match="seal"):
        guest.take()
    host.feed(one)
    with pytest.raises(ProtocolError, match="seal"):
        host.take()


def test_a_rank_proves_only_its_own_number() -> None:
    host, guest = Host(b"key", 0, lambda rank: handshake.WELCOME), Guest(b"key", 1, 0)
    claim = guest.feed(host.greeting())
    with pytest.raises(ProtocolError, match="not a rank of this job"):
        host.feed(struct.pack("<I", 2) + claim[4:])


@pytest.mark.parametrize("seat", [handshake.TAKEN, None])
def test_a_seat_that_is_not_to_be_had(seat: int | None) -> None:
    host, guest = Host(b"key", 0, lambda rank: seat), Guest(b"key", 1, 0)
    claim = guest.feed(host.greeting())
    if seat is None:
        with pytest.raises(ProtocolError, match="rank 1 is not expected here"):
            host.feed(claim)
    else:
        assert guest.feed(host.feed(claim)) == b""
        assert guest.verdict == seat
    assert guest.session is host.session is None


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        (b"", "expected 2 payloads, got 0"),
        (struct.pack("<q", -9) + bytes(30), "expected a payload of"),
        (struct.pack("<Q", 2**63) + bytes(8), "expected a payload of"),
        (bytes(17), "1 bytes more"),
        (bytes(12), "expected 2 payloads, got 1"),
    ],
)
def test_what_is_not_all_payloads(joined: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        handshake.split_payloads(joined, 2)
