"""Life of a host: looked at, installed, learned, kept, and left as it was found.

The one rule: a step that touches the host may be cut anywhere; the next one asks the host again instead of remembering.
Every failure that a person must mend parks the run with a code and a sentence that names the cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import ClassVar, TypeAlias

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.kernel import epoch
from controlplane.kernel import service as kernel
from controlplane.kernel.memo import Memo
from controlplane.kernel.program import Outcome, Program, Terminal, done, goto, step, wait
from controlplane.models.artifact import StoredArtifact
from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight
from controlplane.models.image import ImageCopy
from controlplane.placement.wake import wake_waiting
from controlplane.remote import enrol
from controlplane.remote.enrol import AgentFile, EnrolFailed
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable, KeyRefused
from controlplane.remote.login import Login, LoginRefused, Target, learn_fingerprint, open_login
from controlplane.remote.refusal import carried_out, refusals_park
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.firewall.service import HOST_ROLES
from controlplane.resources.host import artifacts, keys
from controlplane.resources.host.artifacts import ArtifactStore
from controlplane.resources.host.conditions import with_clock
from controlplane.resources.host.learned import learn
from controlplane.resources.storage_pool import service as pools
from hostagent.protocol import codec
from hostagent.protocol.enrol import ChangeLine, InstallPlan
from hostagent.protocol.results import Running
from hostagent.protocol.verbs import Reboot, Uninstall
from hostagent.protocol.wanted import FileWanted, Generation, ImageWanted
from provisioning.artifacts import fallbacks, packages
from provisioning.host import zipapp

TRIES = 3
TRIES_OF_AGENT = 10
LOOK_SECONDS = 300
LOOKS_AT_LEAVING = 300  # two seconds apart at least: purging packages may take minutes
ON_HOST = ("cpus", "memory_bytes", "data_interface")
Logins: TypeAlias = "Callable[[Target], AbstractAsyncContextManager[Login]]"


def agent_file() -> AgentFile:
    """The agent of this release."""
    return AgentFile(content=zipapp.build().content)


@contextlib.contextmanager
def failures(attempt: int, tries: int = TRIES) -> Iterator[None]:
    """Terminal for what trying again cannot cure; HostUnreachable passes until all tries are used up."""
    try:
        yield
    except HostKeyChanged as error:
        words = f"the host shows the key {error.found}, confirmed was {error.expected}: find out why before you confirm it"
        raise Terminal("host.key_mismatch", words) from error
    except LoginRefused as error:
        raise Terminal("host.login_refused", f"{error}: add the bootstrap key there, or give --identity") from error
    except EnrolFailed as error:
        raise Terminal(error.code, str(error)) from error
    except HostUnreachable as error:
        if attempt >= tries:
            raise Terminal("host.unreachable", error.detail) from error
        raise


@contextlib.asynccontextmanager
async def entered(logins: Logins, target: Target, attempt: int) -> AsyncIterator[Login]:
    """Logged in as an operator would be."""
    with failures(attempt):
        async with logins(target) as login:
            yield login


class HostMemo(Memo):
    """`is_leaving`: the agent was told to take itself off; `looks`: how often we looked since whether it has. `boot_id`: the
    boot that a reboot is to end.
    """

    is_leaving: bool = False
    looks: int = 0
    boot_id: str = ""


class HostProgram(Program[Host, HostLinks]):
    """Owns one host: enrols it, repairs it, keeps its facts fresh, removes what was put there."""

    logins: ClassVar[Logins] = open_login
    memo: HostMemo  # pyright: ignore[reportIncompatibleVariableOverride] - the kernel makes one of the annotated class

    @step(within=timedelta(minutes=10))
    async def preflight(self) -> Outcome:
        """Ask the host whether it is fit; nothing is changed yet."""
        async with entered(type(self).logins, await self._target(), self.attempt) as login:
            asked = self.world.clock.now()
            report = await enrol.preflight(login, agent_file(), self._plan())
            report = with_clock(report, asked, self.world.clock.now())
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            host.report = codec.encode(report)
        failed = [check for check in report.checks if check.result == "fail"]
        if failed:
            raise Terminal("host.not_fit", "; ".join(f"{check.name}: {check.why}. {check.fix}" for check in failed))
        return goto(self.install)

    @step(within=timedelta(minutes=30))
    async def install(self) -> Outcome:
        """Ship the agent's file, have its digest checked there, and let it install itself."""
        async with entered(type(self).logins, await self._target(), self.attempt) as login:
            lines = await enrol.install(login, agent_file(), self._plan())
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            host.changes = merged(host.changes, lines)
        if lines and lines[-1].state == "failed":
            raise Terminal(*failure_of(lines[-1]))
        return goto(self.connect)

    @step(within=timedelta(minutes=10))
    async def connect(self) -> Outcome:
        """Log in with the agent's own key, learn what the host is, and let machines come."""
        await self.world.hosts.forget(self.subject_id)
        with failures(self.attempt, TRIES_OF_AGENT), refusals_park():
            facts = await self.world.hosts.facts(self.subject_id)
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            learn(host, facts, self.world.clock.now())
            await pools.learn(tx.session, host, facts, self.world.clock.now())
            return tx.goto(self.equip)

    @step(within=timedelta(hours=1))
    async def equip(self) -> Outcome:
        """Send the artifacts that the control plane holds for this architecture, then let machines come."""
        async with self.tx() as tx:
            wanted = [_wanted(row, await epoch.current(tx.session)) for row in await self._held(tx.session)]
        store = ArtifactStore(self.world.settings.state_dir)
        with refusals_park():
            for artifact in wanted:
                result = await self.world.hosts.ensure(self.subject_id, artifact)
                if isinstance(result, Running) and result.needs:
                    await self.world.hosts.upload(self.subject_id, store.path(result.needs[0]), result.needs[0])
                if carried_out(result) is None:
                    return wait(seconds=1)
            facts = await self.world.hosts.facts(self.subject_id)
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            learn(host, facts, self.world.clock.now())
            host.state, host.identity_sealed = "ready", None
            host.observed_generation = self.subject.generation
            await tx.session.flush()
            await kernel.start(tx.session, "routes", "all")
            await _addresses_changed(tx.session, host)
            await wake_waiting(tx.session)
            return tx.goto(self.serve)

    async def _held(self, session: AsyncSession) -> list[StoredArtifact]:
        return list((await artifacts.stored(session, self.subject.architecture)).values())

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: look at the facts now and then, and at what was asked for when told to."""
        if self.subject.state == "enrolling":
            return goto(self.preflight)
        if self.subject.reboot_generation > self.subject.rebooted_generation:
            return goto(self.reboot)
        try:
            facts = await self.world.hosts.facts(self.subject_id)
        except (HostUnreachable, AgentError):
            facts = None  # whether the link is up is the watch's to say
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            if facts is not None:
                before = host.data_ipv4, host.data_ipv6
                learn(host, facts, self.world.clock.now())
                await pools.learn(tx.session, host, facts, self.world.clock.now())
                if before != (host.data_ipv4, host.data_ipv6):
                    await _addresses_changed(tx.session, host)
            if host.state == "ready":
                host.observed_generation = max(host.observed_generation, self.subject.generation)
            return tx.wait(seconds=LOOK_SECONDS)

    @step(within=timedelta(minutes=30))
    async def reboot(self) -> Outcome:
        """Reboot the host once, and wait for its agent in another boot."""
        try:
            seen = await self.world.hosts.observe_host(self.subject_id)
        except HostUnreachable:
            return wait(seconds=5)
        if not self.memo.boot_id:
            self.memo.boot_id = seen.boot_id
            return goto(self.reboot)
        if seen.boot_id == self.memo.boot_id:
            body = Reboot(machine_id=str((self.subject.facts or {})["machine_id"]), boot_id=self.memo.boot_id)
            with refusals_park():
                await self.world.hosts.call(self.subject_id, "host.reboot", body)
            return wait(seconds=5)
        self.memo.boot_id = ""
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject_id)
            host.rebooted_generation = self.subject.reboot_generation
            return tx.goto(self.serve)

    @step(within=timedelta(hours=1))
    async def destroy(self) -> Outcome:
        """Take copies of images, then the agent, then the row. A host that was never reached is only forgotten."""
        if not self.has_subject:
            return done()
        if not await self._copies_gone():
            return wait(seconds=10)
        was_touched = self.subject.report is not None  # nothing is changed before a preflight was answered
        if was_touched and not self.subject.is_forgotten and not await self._is_taken_off():
            return wait(seconds=2)
        await self.world.hosts.forget(self.subject_id)
        async with self.tx() as tx:
            await tx.session.execute(delete(Host).where(Host.id == self.subject_id))
            return tx.done()

    async def _copies_gone(self) -> bool:
        async with self.tx() as tx:
            copies = list(await tx.session.scalars(select(ImageCopy.id).where(ImageCopy.host_id == self.subject_id)))
            if self.subject.is_forgotten and copies:
                await tx.session.execute(delete(ImageCopy).where(ImageCopy.host_id == self.subject_id))
            for copy_id in copies:
                self.spawn("image_copy", copy_id)
                self.destroy_child("image_copy", copy_id)
        return not copies or self.subject.is_forgotten

    async def _is_taken_off(self) -> bool:
        """By the agent itself where one answers; else, or when that does not come to its end, as an operator would, with
        the first login. Deleting the key is the removal's last act, so a host that is only silent is not done.
        """
        if not self.memo.is_leaving and self.subject.facts is not None and await self._has_asked_agent():
            self.memo.is_leaving = True
            return False
        if self.memo.is_leaving:
            if await self._refuses_key():
                return True
            self.memo.looks += 1
            if self.memo.looks < LOOKS_AT_LEAVING:
                return False
        async with entered(type(self).logins, await self._target(), self.attempt) as login:
            lines = await enrol.uninstall(login, agent_file())
        if lines and lines[-1].state == "failed":
            raise Terminal("host.uninstall_failed", f"{lines[-1].change.kind} {lines[-1].change.subject}: {lines[-1].message}")
        return True

    async def _has_asked_agent(self) -> bool:
        facts = self.subject.facts or {}
        try:
            with refusals_park():
                body = Uninstall(machine_id=str(facts["machine_id"]))
                await self.world.hosts.call(self.subject_id, "host.uninstall", body, deadline_seconds=60)
        except HostUnreachable:
            return False
        return True

    async def _refuses_key(self) -> bool:
        await self.world.hosts.forget(self.subject_id)
        try:
            await self.world.hosts.observe_host(self.subject_id, deadline_seconds=15)
        except KeyRefused:
            return True
        except (HostUnreachable, AgentError):
            pass
        return False

    def _plan(self) -> InstallPlan:
        return plan_of(self.subject.ssh_public_key, self.subject.config, self.subject.architecture)

    async def _target(self) -> Target:
        host = self.subject
        return Target(
            host_id=host.id,
            address=host.address,
            port=host.port,
            user=host.login_user,
            needs_sudo=host.needs_sudo,
            jump=host.jump,
            fingerprint=host.host_key_fingerprint,
            identity=await identity(self, host.identity_sealed, host.id),
        )


class HostPreflightProgram(Program[HostPreflight, HostLinks]):
    """Looks at a host once; what it found is kept for a day."""

    logins: ClassVar[Logins] = open_login

    @step(within=timedelta(minutes=10))
    async def look(self) -> Outcome:
        """Learn the host key; with it (or the one that was expected) log in, ask, and say what adding would change."""
        try:
            return await self._look()
        except Terminal:
            async with self.tx() as tx:  # what parks is not tried again by itself: the identity has done its work
                (await tx.session.get_one(HostPreflight, self.subject_id)).identity_sealed = None
            raise

    async def _look(self) -> Outcome:
        row = self.subject
        with failures(self.attempt):
            found = row.expected_fingerprint or await learn_fingerprint(row.address, row.port, jump=row.jump, host_id=row.id)
        async with self.tx() as tx:
            (await tx.session.get_one(HostPreflight, row.id)).fingerprint = found
        async with entered(type(self).logins, await self._target(found), self.attempt) as login:
            plan, asked = await self._plan(), self.world.clock.now()
            report = await enrol.preflight(login, agent_file(), plan)
            report = with_clock(report, asked, self.world.clock.now())
            lines = await enrol.plan_changes(login, agent_file(), plan) if report.is_fit else ()
        async with self.tx() as tx:
            seen = await tx.session.get_one(HostPreflight, row.id)
            seen.report, seen.changes = codec.encode(report), merged([], lines)
            seen.finished_at, seen.identity_sealed = self.world.clock.now(), None
            seen.observed_generation = seen.generation
            return tx.goto(self.keep)

    @step(within=None)
    async def keep(self) -> Outcome:
        """At rest for a day."""
        row = self.subject
        if row.finished_at is not None and self.world.clock.now() - row.finished_at > timedelta(days=1):
            return goto(self.destroy)
        return wait(timedelta(hours=1))

    @step(within=timedelta(minutes=5))
    async def destroy(self) -> Outcome:
        async with self.tx() as tx:
            await tx.session.execute(delete(HostPreflight).where(HostPreflight.id == self.subject_id))
            return tx.done()

    async def _plan(self) -> InstallPlan:
        """With the key of the host that is here already, so that a repair does not look like another deployment."""
        row = self.subject
        async with self.tx() as tx:
            same = Host.address == row.address, Host.port == row.port
            known = await tx.session.scalar(select(Host.ssh_public_key).where(*same))
            bootstrap = await tx.session.scalar(select(BootstrapKey.public_key))
        return plan_of(known or bootstrap or "", row.config, "")

    async def _target(self, fingerprint: str) -> Target:
        row = self.subject
        return Target(
            host_id=row.id,
            address=row.address,
            port=row.port,
            user=row.login_user,
            needs_sudo=row.needs_sudo,
            jump=row.jump,
            fingerprint=fingerprint,
            identity=await identity(self, row.identity_sealed, row.id),
        )


async def identity(program: HostProgram | HostPreflightProgram, sealed: bytes | None, subject_id: str) -> bytes:
    """The uploaded identity, else the deployment's bootstrap key."""
    sealer = program.world.sealer
    if sealed is not None:
        return sealer.open(sealed, context=keys.identity_context(subject_id))
    async with program.tx() as tx:
        bootstrap = await tx.session.scalar(select(BootstrapKey.private_key_sealed))
    if bootstrap is None:
        raise Terminal("host.login_refused", "there is neither an identity nor a bootstrap key")
    return sealer.open(bootstrap, context=keys.BOOTSTRAP_CONTEXT)


async def _addresses_changed(session: AsyncSession, host: Host) -> None:
    """No machine may reach it any more, and what shall be reached from gateways or edges is reached from here."""
    await session.flush()
    await kernel.start(session, "policy", "all")
    for far_end, role in HOST_ROLES.items():
        if role in host.roles:
            await firewalls.wake_role(session, far_end)


def _wanted(row: StoredArtifact, now_epoch: int) -> ImageWanted:
    """One artifact on a host. A newer file raises the generation by one; the first one's is the time it was stored at, so that
    a list that was lost and made anew goes on above it.
    """
    number = int(row.created_at.timestamp()) + row.number - 1
    file = FileWanted(name=row.file, sha256=row.sha256, size_bytes=row.size_bytes)
    generation = Generation(epoch=now_epoch, number=number)
    return ImageWanted(id=row.name, generation=generation, purpose="artifact", files=(file,))


def plan_of(public_key: str, config: Mapping[str, Json], architecture: str) -> InstallPlan:
    """What `install` is told. Until the host was asked, it is taken for the most common architecture."""
    given = {name: value for name, value in config.items() if name in ON_HOST and isinstance(value, str | int)}
    name = architecture or "x86_64"
    return InstallPlan(authorized_key=public_key, packages=packages(name), config=given, fallbacks=fallbacks(name))


def merged(known: list, lines: tuple[ChangeLine, ...]) -> list:
    """The changes that were made on the host, oldest first, each thing once; a repair adds what it changed."""
    found = {(item["kind"], item["subject"]): item for item in known}
    for line in lines:
        if line.state != "failed":
            found.setdefault((line.change.kind, line.change.subject), codec.encode(line.change))
    return list(found.values())


def failure_of(line: ChangeLine) -> tuple[str, str]:
    """Code and sentence of a change that could not be made."""
    said = line.message.lower()
    is_full = "no space left" in said or "quota exceeded" in said
    words = f"{line.change.action} {line.change.kind} {line.change.subject}: {line.message}"
    return ("host.disk_full" if is_full else "host.install_failed"), words
