"""When a call that stands for earlier ones too is done."""

from types import SimpleNamespace

import pytest
from dtorch_file_store.calls import Call
from dtorch_file_store.tickets import FileTicket

from dtorch_core import PeerLostError


class TestTicketWithEarlier:
    """A barrier's."""

    @pytest.mark.parametrize("fails", [True, False])
    def test_one_that_failed_is_done_while_earlier_ones_go_on(self, fails):
        earlier, call = Call("earlier", 1), Call("barrier", 1)
        earlier.offers, earlier.came, call.finished = [object()], 1, True
        call.error = PeerLostError("rank 1 was lost") if fails else None
        joint = SimpleNamespace(unfinished=lambda rank: [earlier], done=lambda call, rank: call.finished)
        ticket = FileTicket(joint, call, 0, -1).with_earlier()
        assert ticket.done() == fails
        earlier.finished = True
        assert ticket.done()
