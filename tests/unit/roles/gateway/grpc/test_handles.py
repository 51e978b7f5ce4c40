"""Handles that clients give back."""

from __future__ import annotations

import pytest

from mqmesh.protocol.grpc.codes import RefusedCall, ReplyCode
from mqmesh.roles.gateway.grpc.handles import Handles, RecallHandle, Receipt, TransactionHandle

RECEIPT = Receipt("broker-a", 2**40, 3, 2**41, True)


@pytest.fixture
def handles() -> Handles:
    found = Handles()
    found.secret = bytes(range(32))
    return found


def test_a_handle_comes_back_as_it_was(handles):
    text = handles.seal(RECEIPT, "g/t")
    assert len(text) <= 256
    assert handles.unseal(Receipt, text, "g/t") == RECEIPT
    other = Handles()
    other.secret = handles.secret
    assert other.unseal(Receipt, text, "g/t") == RECEIPT, "another gateway with the secret"


@pytest.mark.parametrize("context", ["g/u", "", "g/t/"])
def test_a_handle_counts_in_its_context_only(handles, context):
    text = handles.seal(RECEIPT, "g/t")
    with pytest.raises(RefusedCall, match="its signature is wrong") as caught:
        handles.unseal(Receipt, text, context)
    assert caught.value.code is ReplyCode.INVALID_RECEIPT_HANDLE


def test_each_change_of_a_handle_is_found(handles):
    text = handles.seal(RECEIPT, "g/t")
    for at in range(len(text) - 1):  # the last character has bits that stand for nothing
        other = "B" if text[at] == "A" else "A"
        with pytest.raises(RefusedCall):
            handles.unseal(Receipt, text[:at] + other + text[at + 1 :], "g/t")


@pytest.mark.parametrize("text", ["", "x", "é", "A" * 40, "A" * 5_000, "=" * 8])
def test_rubbish_is_refused(handles, text):
    with pytest.raises(RefusedCall):
        handles.unseal(TransactionHandle, text, "t")


def test_one_kind_of_handle_is_not_taken_for_another(handles):
    text = handles.seal(RecallHandle("broker-a", 1, 2, "id"), "t")
    with pytest.raises(RefusedCall):
        handles.unseal(Receipt, text, "t")


def test_a_proof_is_hidden_and_comes_back(handles):
    proof = bytes(range(16))
    hidden = handles.hide(proof, "broker-a", 7)
    assert hidden != proof
    assert handles.hide(hidden, "broker-a", 7) == proof
    assert handles.hide(hidden, "broker-a", 8) != proof
