"""One health check of one backend at one address.

The one rule: whatever the backend does, an attempt ends within its time-out with yes or a reason. It never raises, and reads at
most MAX_ANSWER_BYTES of what a tenant's machine sends. What went wrong here, on this host, is told apart from what it said.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from typing import Literal, NamedTuple

from hostagent.probes import grpc, web
from hostagent.probes.channel import Unhealthy, connect
from hostagent.probes.patience import patience
from hostagent.protocol.network import ProbeWanted

Kind = Literal["well", "wrong", "refused", "silent", "ours"]
_REFUSALS = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EADDRINUSE})


class Finding(NamedTuple):
    """`reason`: in a few words why the backend is not well; empty when it is.

    `refused`: its machine is there, says so itself, and nobody listens: that proves an end. `silent`: nothing came. `wrong`:
    it answered something else. `ours`: this host has no socket, port or memory left: nothing is learnt of the backend.
    """

    reason: str = ""
    kind: Kind = "well"


WELL = Finding()


async def attempt(probe: ProbeWanted, address: str, port: int) -> Finding:
    try:
        async with patience(probe.timeout_ms / 1000):
            match probe.kind:
                case "tcp":
                    await connect(address, port)
                case "grpc":
                    await grpc.check(probe, address, port)
                case _:
                    await web.check(probe, address, port)
    except TimeoutError:
        return Finding(f"no answer within {probe.timeout_ms} ms", "silent")
    except Unhealthy as error:
        return Finding(str(error), "wrong")
    except ssl.SSLError as error:
        return Finding(f"TLS: {error.reason or error}", "wrong")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
        return Finding(reason, _kind_of(error.errno))
    except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
        return Finding(str(error) or type(error).__name__, "wrong")
    return WELL


def _kind_of(number: int | None) -> Kind:
    if number in _OUR_OWN:
        return "ours"
    return "refused" if number in _REFUSALS else "silent"
