"""What links make of the events of their streams. Nothing is connected."""

from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from gateway_fakes import describe

from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import BlockSent
from draftwire.runtime import messages
from draftwire.runtime.status import MAX_MESSAGE
from draftwire.v1 import drafter_pb2, session_pb2, verifier_pb2
from draftwire_gateway.peers.wire import DrafterLink, VerifierLink
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost

KEY = (7, 2)
CONTEXT_LENGTH = 8


def link_of(kind: Any) -> tuple[Any, list[Any]]:
    """Returns a link with one session, and what its inbox gets."""
    link, events = kind("peer:1", MagicMock(), 1.0), list[Any]()
    link.description = describe("model", CONTEXT_LENGTH)
    link._inboxes[KEY] = MagicMock(put_nowait=events.append)
    return link, events


@pytest.mark.parametrize("name", ["verdict", "prompt_read"])
def test_event_of_more_tokens_than_the_context_ends_the_stream_and_is_not_decoded(name: str) -> None:
    link, events = link_of(VerifierLink)
    token_ids = [1] * (CONTEXT_LENGTH + 1)
    fields = {"verdict": session_pb2.Verdict, "prompt_read": verifier_pb2.PromptRead}
    event = verifier_pb2.TargetEvent(**{name: fields[name](token_ids=token_ids)})
    with patch.object(messages, f"{name}_from_proto") as decode, pytest.raises(ProtocolViolationError, match="peer:1"):
        link._receive(event)
    decode.assert_not_called()
    assert events == []


def test_reply_of_a_drafter_reaches_its_session_and_no_other() -> None:
    link, events = link_of(DrafterLink)
    for session_id in (KEY[0], 8):
        sent = drafter_pb2.BlockSent(session_id=session_id, epoch=KEY[1], round=300, attempt=1)
        link._receive(drafter_pb2.DraftEvent(sent=sent))
    assert events == [BlockSent(*KEY, 300, 1)]


def test_messages_of_peers_are_cut() -> None:
    long = "x" * 2 * MAX_MESSAGE
    link, events = link_of(DrafterLink)
    failure = session_pb2.SessionFailure(session_id=KEY[0], epoch=KEY[1], status_code=14, message=long)
    link._receive(drafter_pb2.DraftEvent(failure=failure))
    verifier, refusals = link_of(VerifierLink)
    refusal = verifier_pb2.BlockRefusal(session_id=KEY[0], epoch=KEY[1], message=long)
    verifier._receive(verifier_pb2.TargetEvent(refusal=refusal))
    ((lost,), (refused,)) = events, refusals
    assert isinstance(lost, DrafterLost)
    assert isinstance(refused, BlocksRefused)
    assert max(len(str(lost.error)), len(str(refused.error))) < MAX_MESSAGE + 100
