"""What the agent remembers of a machine beyond its document. The one rule: a record is on disk before its machine starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from dataclasses import dataclass

from hostagent.lib import files
from hostagent.lib.hostconfig import UIDS_PER_MACHINE
from hostagent.lib.paths import Paths
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation

_MAX_UID = (1 << 31) - 1
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VmRecord:
    """`uid_slot` picks the machine's uid range. `restarted`: the restart_generation its process was started with.

    `started`: the newest document under which it ran; `held`: the guest powered itself off under this one and stays off until
    a newer one. `digest`: of what its process was started from, so that a document that needs a restart is told apart.
    `starts` counts starts, ever. `is_starting`: from before its process is made until the driver said that it runs; found on a
    running machine it means that an agent died in between, and only the driver knows whether the machine really runs.
    `disks`: the volumes that its process has; None: it was started by an agent that did not write them down.
    `reset_due`: volumes whose daemon died under it with requests unanswered; `resets`: how often it was reset for that, ever,
    and when last.
    `accelerator`: what its last start had, `kvm` or `tcg`; "" where there is no virtual CPU. `nics`: whose links it was given.
    """

    uid_slot: int
    restarted: int = 0
    started: Generation | None = None
    held: Generation | None = None
    digest: str = ""
    starts: int = 0
    is_starting: bool = False
    accelerator: str = ""
    nics: tuple[str, ...] = ()
    disks: tuple[str, ...] | None = None
    reset_due: tuple[str, ...] = ()
    resets: int = 0
    reset_unix_ms: int = 0


UNKNOWN = -1  # `restarted` of a machine whose record was lost


class Records:
    """`broken`: machines whose record could not be read. Their uid range is told by the owner of their run directory: it must
    not be given to another machine while theirs may run.
    """

    def __init__(self, paths: Paths, uid_base: int) -> None:
        self._paths = paths
        self._uid_base = uid_base
        self._records: dict[str, VmRecord] = {}
        self.broken: set[str] = set()
        self._load()

    def get(self, vm_id: str) -> VmRecord | None:
        return self._records.get(vm_id)

    def get_or_make(self, vm_id: str) -> VmRecord:
        """Raises AgentError `host.uids_exhausted`."""
        found = self._records.get(vm_id)
        if found is not None:
            return found
        taken = {record.uid_slot for record in self._records.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if self._uid_base + (slot + 1) * UIDS_PER_MACHINE - 1 > _MAX_UID:
            raise AgentError("host.uids_exhausted", "every uid range of this host is taken", retryable=False)
        record = VmRecord(uid_slot=slot)
        self.put(vm_id, record)
        return record

    def adopted(self, vm_id: str, restart_generation: int) -> VmRecord:
        """`get_or_make`; of a machine whose record was lost it is taken that it was restarted as often as asked."""
        record = self.get_or_make(vm_id)
        if record.restarted == UNKNOWN:
            record = dataclasses.replace(record, restarted=restart_generation)
            self.put(vm_id, record)
        return record

    def put(self, vm_id: str, record: VmRecord) -> None:
        if self._records.get(vm_id) == record:
            return
        files.write_atomically(self._paths.vm_directory(vm_id) / "record.json", json.dumps(codec.encode(record)).encode())
        self._records[vm_id] = record

    def drop(self, vm_id: str) -> None:
        self._records.pop(vm_id, None)
        directory = self._paths.vm_directory(vm_id)
        if directory.is_dir():
            files.remove(directory / "record.json")

    def uid(self, vm_id: str) -> int:
        """The first uid (and gid) of the machine's range."""
        return self._uid_base + self.get_or_make(vm_id).uid_slot * UIDS_PER_MACHINE

    def _load(self) -> None:
        for directory in (self._paths.state / "vm").glob("*"):
            files.drop_partials(directory)
        for path in (self._paths.state / "vm").glob("*/record.json"):
            try:
                self._records[path.parent.name] = codec.decode(VmRecord, json.loads(path.read_bytes()))
            except (OSError, ValueError):
                self._recover(path.parent.name)

    def _recover(self, vm_id: str) -> None:
        """A lost record's uid range, from what its machine owns; without that nothing of it runs, and any range will do."""
        self.broken.add(vm_id)
        with contextlib.suppress(FileNotFoundError):
            slot, rest = divmod(self._paths.vm_run_directory(vm_id).stat().st_uid - self._uid_base, UIDS_PER_MACHINE)
            if slot >= 0 and rest == 0:
                self._records[vm_id] = VmRecord(uid_slot=slot, restarted=UNKNOWN)
        log.warning("the record of %s cannot be read; it goes on with what is seen of it", vm_id)
