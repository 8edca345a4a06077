"""What may stand in the place of a host's address and of the host to go through."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from controlplane.remote.link import HostUnreachable
from controlplane.remote.login import learn_fingerprint
from controlplane.resources.host.schemas import Login


@pytest.mark.parametrize(
    "address", ["a" * 64, "rack1..example.net", "rack1:4", f"rack1.{'b' * 64}.net", "2026-13-01T00:00:00Z"]
)
def test_what_no_resolver_can_be_asked_for_is_refused(address):
    with pytest.raises(ValidationError, match="neither an IP address nor a host name"):
        Login(address=address)


@pytest.mark.parametrize("address", ["rack1", "rack1-4.example.net", "10.0.0.1", "fd00::1", "a" * 63])
def test_addresses_and_names_pass(address):
    assert Login(address=address).address == address


@pytest.mark.parametrize("jump", ["ops@bastion:ssh", "ops@bastion:0", "ops@bastion:65536"])
def test_a_jump_host_has_a_real_port(jump):
    with pytest.raises(ValidationError, match="no port"):
        Login(address="rack1", jump=jump)


@pytest.mark.parametrize("jump", ["", "ops@bastion", "ops@bastion:2222", "ops@[fd00::1]"])
def test_jump_hosts_pass(jump):
    assert Login(address="rack1", jump=jump).jump == jump


@pytest.mark.parametrize("field", [{"port": True}, {"port": "22"}, {"sudo": 1}, {"sudo": "true"}])
def test_numbers_and_truth_values_are_written_as_such(field):
    with pytest.raises(ValidationError, match="must be"):
        Login.model_validate({"address": "rack1", **field})


async def test_a_name_that_cannot_be_resolved_ends_the_look_at_once():
    with pytest.raises(HostUnreachable, match="label"):
        await learn_fingerprint("a" * 64, 22)
