"""Groups that take ranks' different calls for the same, or for the end."""

import time

from dtorch_samedevice_group.group import SameDeviceProcessGroup

from dtorch_core import CollectiveMismatchError

from .base import Changes, EndsWork, Works, wrong


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class SwallowsMismatches(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                pass


@wrong("test_mismatch_raises_on_every_rank[root of broadcast]")
class ComparesNames(Changes):
    def _changed_post(self, note, tensors, collective, *stream):
        return self._post(note.partition("(")[0], tensors, collective, *stream)


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class NamesNobody(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                raise CollectiveMismatchError("somebody called something else") from None


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class IsUselessAfterwards(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                time.sleep(0.05)
                with self._ticket._joint.presence.mutex:
                    self._ticket._joint.presence.abort("broken")

                raise


@wrong("test_wrong_call_raises_there_and_is_told_to_the_others[too few tensors]")
class KeepsMistakesToItself(SameDeviceProcessGroup):
    def refuse(self, call, error):
        next(self._engine._numbers)
