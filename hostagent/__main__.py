"""The agent's faces: `serve`, `supervise`, `dispatch`, `facts`, `preflight`, `install`, `uninstall`, `version`.

The one rule: a face imports what it needs when it is chosen; `dispatch` starts once for every SSH channel.
"""

from __future__ import annotations

import sys

USAGE = "usage: agent.pyz serve|supervise|dispatch|facts|preflight|install|uninstall|version [--root DIR] …"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(USAGE, file=sys.stderr)
        return 2
    face, rest = arguments[0], arguments[1:]
    if face == "dispatch":
        from hostagent import dispatch

        return dispatch.main(_root(rest) + "/run/agent.sock" if rest else "/run/bedplate/agent.sock")
    from hostagent import faces

    return faces.run(face, rest)


def _root(arguments: list[str]) -> str:
    if len(arguments) != 2 or arguments[0] != "--root":
        raise SystemExit(USAGE)
    return arguments[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
