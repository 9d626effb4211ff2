"""What wrong groups are made of."""

import threading

from dtorch_samedevice_group.group import SameDeviceProcessGroup
from dtorch_samedevice_group.work import GroupWork, seconds_of

from dtorch_core import Support
from dtorch_core.testing import DEVICES

ALL = frozenset("cpu cuda uneven bitwise_ops p2p any_source tags self_send split mismatch rank_order async".split())

PATIENCE = 1.0
"""Seconds for tests that are to fail; the right group gets all the time it may need."""

WRONG = []


def same_device(topology):
    return Support.yes(1, "one device") if topology.same_device else Support.no("several devices")


def wrong(test):
    """Mark a wrong group with the kit's test that has to catch it; ``DEVICE`` in it is the first one tested on."""

    def mark(group):
        group.caught_by = test.replace("DEVICE", DEVICES[0])
        WRONG.append(group)
        return group

    return mark


class Around(SameDeviceProcessGroup):
    """For groups that do something around every collective; ``around`` is given its c10d name."""

    def around(self, name, call):
        return call()


def _around(name):
    def method(self, *args, **named):
        return self.around(name, lambda: getattr(super(Around, self), name)(*args, **named))

    return method


for _name, _method in vars(SameDeviceProcessGroup).items():
    if hasattr(_method, "__wrapped__"):
        setattr(Around, _name, _around(_name))


class Works(Around):
    """For groups whose collectives are right, and whose Works are not."""

    work = GroupWork

    def around(self, name, call):
        right = call()
        return self.work(right._ticket, right._outputs, right._timeout)


class EndsWork(GroupWork):
    """All of it goes through ``_end``."""

    def wait(self, timeout=None):
        self._end(seconds_of(timeout, self._timeout))
        return True


class Changes(Around):
    """For groups that do something else to the tensors: ``changed`` stands around the work."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self._calling = threading.local()
        self._post, self._engine.post = self._engine.post, self._changed_post

    def around(self, name, call):
        self._calling.name = name
        return call()

    def changed(self, name, work, offers):
        return work(offers)

    def _changed_post(self, note, tensors, collective, *stream):
        name = getattr(self._calling, "name", "")

        def work(offers):
            for task in self.changed(name, collective.work, offers):
                task()

            return ()

        return self._post(note, tensors, collective._replace(work=work), *stream)
