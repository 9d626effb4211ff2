"""The steps of a collective, by the functions that take them; those of a backend that is not loaded are left out."""

from __future__ import annotations

CALL = "whoever calls: options, and what is in no other step"
POST = "post: take a place among the ranks"
SIGNAL = "signal: tell the others"
SLEEP = "wait"
"""Told as two rows: until the other rank signals, and from there until this one runs."""
TURN, WAKE_UP = "asleep: the other rank is under way", "asleep: from its signal until this rank runs"

_GROUP, _MEMORY, _FILE = "dtorch_samedevice_group", "dtorch_memory_store", "dtorch_file_store"

STEPS = (
    ("read the call's arguments", f"{_GROUP}.repeats:read"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.allreduce"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.allgather"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.reduce_scatter"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.alltoall"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.broadcast"),
    ("find its plan: checks are done", f"{_GROUP}.group:SameDeviceProcessGroup.barrier"),
    ("number it, add its fingerprint", f"{_GROUP}.engine:Engine.post"),
    ("offer it to the store", f"{_MEMORY}.store:MemoryTensorStore.post"),
    ("offer it to the store", f"{_FILE}.store:FileTensorStore.post"),
    (POST, f"{_MEMORY}.joint:Joint.post"),
    (POST, f"{_FILE}.joint:Joint.post"),
    ("pack the values", f"{_FILE}.offers:own"),
    ("pack the values", f"{_FILE}.offers:pack"),
    ("write the message", f"{_FILE}.joint:frame"),
    ("send, wake, let go", f"{_FILE}.node:Node.after"),
    (SIGNAL, f"{_FILE}.link:Link.flush"),
    ("begin the work", f"{_MEMORY}.joint:Joint._start"),
    ("begin the work", f"{_FILE}.progress:Progress._go_on"),
    ("find what follows from the notes", f"{_FILE}.parts:Parts._known_of"),
    ("compare the fingerprints", f"{_GROUP}.engine:_Compared.__call__"),
    ("decide on a fused kernel", f"{_GROUP}.fused_again:Again.left"),
    ("queue it on the GPU", f"{_GROUP}.fused_launch:Launcher.repeat"),
    ("queue it on the GPU", f"{_GROUP}.fused_launch:Launcher.launch"),
    ("work: share it out, copies", f"{_GROUP}.collectives:share"),
    ("work: share it out, copies", f"{_GROUP}.collectives:_reduce_out"),
    ("work: share it out, copies", f"{_GROUP}.collectives:copies"),
    ("work: share it out, copies", f"{_FILE}.parts:_from_values"),
    ("work: add up", "dtorch_core.reduction:Rule.into"),
    ("make tensors of what came", f"{_FILE}.offers:values"),
    ("end the call: whom to wake", f"{_MEMORY}.joint:Joint._finish"),
    ("end the call: whom to wake", f"{_FILE}.progress:Progress.end"),
    (SIGNAL, f"{_MEMORY}.joint:wake"),
    ("make the Work", f"{_GROUP}.work:GroupWork.__init__"),
    ("the Work's wait: is it done?", f"{_GROUP}.work:GroupWork.wait"),
    ("the Work's wait: is it done?", f"{_MEMORY}.joint:MemoryTicket.wait"),
    ("the Work's wait: is it done?", f"{_FILE}.tickets:FileTicket.wait"),
    ("prepare to sleep, look again", f"{_MEMORY}.joint:Joint.wait_for"),
    ("prepare to sleep, look again", f"{_FILE}.joint:Joint.wait_for"),
    ("prepare to sleep, look again", f"{_FILE}.node:Node.wait"),
    ("prepare to sleep, look again", f"{_FILE}.reading:Reading.wait"),
    ("prepare to sleep, look again", f"{_FILE}.reading:Reading._read"),
    (SLEEP, f"{_MEMORY}.waiting:Waiter.sleep"),
    (SLEEP, f"{_FILE}.watch:Watch._poll"),
    ("receive", f"{_FILE}.node:Node._take"),
    ("receive", f"{_FILE}.link:Link.receive"),
    ("handle the message", f"{_FILE}.node:Node._handle"),
    ("handle the message", f"{_FILE}.offers:unpack"),
)
"""Pairs of a step's name and a function, in the order of a table. Several functions may be one step."""
