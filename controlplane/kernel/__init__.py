"""Durable state machines on PostgreSQL. Services use what is exported here; programs use `controlplane.kernel.program`."""

from controlplane.kernel.service import destroy, resume, signal, start

__all__ = ["destroy", "resume", "signal", "start"]
