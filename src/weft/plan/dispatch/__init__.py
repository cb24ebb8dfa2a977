"""Which samples of a batch go to which of several unlike replicas, so that all end at about the same time."""

from weft.plan.dispatch.balanced import dispatch, dispatch_by_length, dispatch_evenly
from weft.plan.dispatch.fleet import Dispatch, Fleet
from weft.plan.dispatch.replica_time import ReplicaModel, ReplicaTime

__all__ = [
    "Dispatch",
    "Fleet",
    "ReplicaModel",
    "ReplicaTime",
    "dispatch",
    "dispatch_by_length",
    "dispatch_evenly",
]
