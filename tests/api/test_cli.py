"""The command line against a real API: what it prints where, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
import yaml
from sqlalchemy import text

from controlplane.api import server
from controlplane.api.app import create_app
from controlplane.authz.service import SYSTEM
from controlplane.cli import main as cli
from controlplane.core.sealing import Sealer
from controlplane.identity.service import ensure_operator_token
from controlplane.kernel.database import Database
from controlplane.listener import bind
from controlplane.resources.operation import service as operations

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Api:
    """The API in a thread; `execute` runs a coroutine with its database in its loop."""

    loop: asyncio.AbstractEventLoop
    database: Database
    url: str

    def execute(self, make):
        async def in_session():
            async with self.database.session() as session:
                return await make(session)

        return asyncio.run_coroutine_threadsafe(in_session(), self.loop).result(30)

    def sql(self, statement: str, **values):
        return self.execute(lambda session: session.execute(text(statement), values))


@pytest.fixture
def server_url(database_url, settings, tmp_path):
    ready, stop, found = threading.Event(), [], []
    listener = bind("127.0.0.1:0")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def run():
        database = await Database.open(database_url, pool_size=4)
        async with database.session() as session:
            await ensure_operator_token(session, tmp_path / "state")
        app = create_app(settings, database, sealer=Sealer(bytes(32)))
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2)
        uvicorn_server = server.Server(config)
        uvicorn_server.capture_signals = contextlib.nullcontext
        stop.append(uvicorn_server)
        found.append(Api(loop=asyncio.get_running_loop(), database=database, url=url))
        ready.set()
        await uvicorn_server.serve(sockets=[listener])
        await database.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    stop[0].should_exit = True
    thread.join(30)
    listener.close()
    assert not thread.is_alive()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """No context but the operator token in the state directory."""
    for name in [name for name in os.environ if name.startswith("BEDPLATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("BEDPLATE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def api(server_url, home, monkeypatch):
    monkeypatch.setenv("BEDPLATE_URL", server_url.url)
    return server_url


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def bedplate(monkeypatch, capsys):
    def run(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["bedplate", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


def test_life_of_a_project(api, bedplate):
    made = bedplate("project", "create", "search", "--label", "team=a", "-o", "json").json()
    assert made["labels"] == {"team": "a"}
    assert bedplate("project", "list", "-o", "name").out == "search\n"
    assert (
        bedplate("project", "update", "search", "--description", "x", "--allow-containers", "-o", "json").json()["generation"]
        == 2
    )
    shown = bedplate("project", "show", made["id"])
    assert "description" in shown.out
    assert yaml.safe_load(bedplate("project", "show", "search", "-o", "yaml").out)["allow_containers"] is True
    refused = bedplate("project", "delete", "search")
    assert (refused.code, refused.out) == (2, "")
    assert "--yes" in refused.err
    deleted = bedplate("project", "delete", "search", "--yes")
    assert (deleted.code, deleted.out) == (0, "")
    assert bedplate("project", "list", "-o", "json").json() == []


def test_table_and_wide(api, bedplate):
    bedplate("project", "create", "search", "--description", "for people")
    table = bedplate("project", "list")
    assert table.out.splitlines()[0].split() == ["NAME", "ID", "AGE"]
    assert table.err == ""
    wide = bedplate("project", "list", "-o", "wide")
    assert "DESCRIPTION" in wide.out
    assert "for people" in wide.out


def test_a_file_is_the_body_and_options_win(api, bedplate, tmp_path):
    file = tmp_path / "project.yaml"
    file.write_text("name: search\ndescription: from the file\nlabels: {team: a}\n")
    made = bedplate("project", "create", "-f", str(file), "--description", "from the option", "-o", "json").json()
    assert (made["name"], made["description"], made["labels"]) == ("search", "from the option", {"team": "a"})
    other = bedplate("project", "create", "-f", "-", "-o", "json", stdin="name: other").json()
    assert other["name"] == "other"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["project", "show", "nothing"], 3, ["No such project", "bedplate project list", "project.not_found", "req_"]),
        (["token", "show", "nothing"], 3, ["No such token", "bedplate token list"]),
        (["project", "create", "UPPER"], 2, ["/name", "request.invalid", "bedplate project create --help"]),
        (["project", "create", "taken"], 5, ["The name is taken", "project.name_taken"]),
        (["project", "create"], 2, ["/name"]),
        (["project", "list", "--sort", "color"], 2, ["cannot sort by color"]),
        (["project", "nonsense"], 2, ["No such command"]),
        (["project", "list", "-o", "xml"], 2, ["xml"]),
        (["project", "create", "x", "-f", "/nonexistent"], 2, ["cannot read /nonexistent"]),
        (["project", "create", "x", "--label", "novalue"], 2, ["KEY=VALUE"]),
        (["nonsense"], 2, ["No such command"]),
        (["operation", "wait", "op_01jd2x4k3fe8v9m2q7t5w0y6za"], 3, ["No such operation"]),
        (["operation", "wait", "x", "--timeout", "soon"], 2, ["write 90s"]),
        (["context", "use", "nothing"], 3, ["no context nothing"]),
        (["context", "set", "new"], 2, ["--url"]),
    ],
)
def test_errors_end_with_their_code_and_say_what_to_do(api, bedplate, arguments, code, words):
    bedplate("project", "create", "taken")
    ran = bedplate(*arguments)
    assert (ran.code, ran.out) == (code, ""), ran.err
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_login_with_a_member_token_and_what_it_may_not(api, bedplate, home, monkeypatch):
    bedplate("project", "create", "ours")
    token = bedplate("token", "create", "ci", "--project", "ours", "--expires", "2h")
    secret = token.out.strip()
    assert secret.startswith("bpt_")
    assert secret not in token.err
    url = api.url
    monkeypatch.delenv("BEDPLATE_URL")
    assert bedplate("login", url, "--name", "work", stdin="wrong-token\n").code == 4
    signed_in = bedplate("login", url, "--name", "work", stdin=secret + "\n")
    assert signed_in.code == 0, signed_in.err
    assert secret not in signed_in.out + signed_in.err
    config = home / "config/bedplate/config.toml"
    assert config.stat().st_mode & 0o777 == 0o600
    assert bedplate("token", "current", "-o", "json").json()["name"] == "ci"
    forbidden = bedplate("token", "list")
    assert forbidden.code == 4
    assert "operator" in forbidden.err
    listed = bedplate("context", "list")
    assert "work" in listed.out
    assert "ours" in listed.out
    assert secret not in listed.out
    monkeypatch.setenv("BEDPLATE_TOKEN", "bpt_other")
    ran = bedplate("project", "list")
    assert ran.code == 4
    assert "bedplate login" in ran.err


def test_contexts(bedplate, home):
    assert bedplate("context", "set", "one", "--url", "https://one.example/").code == 0
    assert bedplate("context", "set", "two", "--url", "https://two.example", "-p", "web").code == 0
    rows = bedplate("context", "list", "-o", "json").json()
    assert [(row["name"], row["current"], row["url"]) for row in rows] == [
        ("one", "*", "https://one.example"),
        ("two", "", "https://two.example"),
    ]
    assert bedplate("context", "use", "two").code == 0
    assert [row["current"] for row in bedplate("context", "list", "-o", "json").json()] == ["", "*"]
    assert bedplate("context", "delete", "two").code == 0
    (home / "config/bedplate/config.toml").write_text("not toml [")
    broken = bedplate("context", "list")
    assert broken.code == 2
    assert "cannot read" in broken.err


def test_project_use_is_remembered(api, bedplate):
    bedplate("project", "create", "search")
    assert bedplate("project", "use", "nothing").code == 3
    assert bedplate("project", "use", "search").code == 0
    assert bedplate("context", "list", "-o", "json").json()[0]["project"] == "search"


def test_a_saved_token_is_not_sent_to_another_url(bedplate, home, monkeypatch):
    from controlplane.cli import context

    contexts = context.load()
    contexts.put(context.Context(name="one", url="https://one.example", token="bpt_secret", project="p"))
    contexts.save()
    assert context.active().token == "bpt_secret"
    monkeypatch.setenv("BEDPLATE_URL", "https://two.example")
    assert (context.active().token, context.active().project) == ("", "")


def test_no_token_over_plain_http(bedplate, home, monkeypatch):
    monkeypatch.setenv("BEDPLATE_URL", "http://192.0.2.1:8700")
    monkeypatch.setenv("BEDPLATE_TOKEN", "bpt_secret")
    ran = bedplate("project", "list")
    assert ran.code == 2
    assert "plain text" in ran.err


@pytest.mark.parametrize("arguments", [("project", "list"), ("event", "tail")])
def test_unreachable_says_what_to_do(bedplate, home, monkeypatch, arguments):
    monkeypatch.setenv("BEDPLATE_URL", "http://127.0.0.1:1")
    ran = bedplate(*arguments)
    assert ran.code == 1
    assert "cannot reach http://127.0.0.1:1" in ran.err
    assert "bedplate up" in ran.err


LEAVE_STEP = """
UPDATE run SET step = :step, history = history || jsonb_build_array(jsonb_build_array(
    cast(:left AS text), extract(epoch FROM now()), extract(epoch FROM now()), 1, 'done', NULL))"""


class TestWaiting:
    @pytest.fixture
    def operation(self, api, bedplate):
        project = bedplate("project", "create", "subject", "-o", "json").json()["id"]
        record = api.execute(lambda session: operations.record(session, "project", project, 1, "vm.create", SYSTEM))
        return record.id

    def test_succeeds(self, api, bedplate, operation):
        threading.Timer(0.5, api.sql, ["UPDATE project SET observed_generation = 1"]).start()
        ran = bedplate("operation", "wait", operation, "-o", "json")
        assert ran.json()["state"] == "succeeded"

    def test_times_out(self, bedplate, operation):
        ran = bedplate("operation", "wait", operation, "--timeout", "1s")
        assert ran.code == 7
        assert f"bedplate operation wait {operation}" in ran.err

    @pytest.mark.parametrize(
        ("state", "error_code", "code"),
        [("failed", "image.bad", 1), ("failed", "placement.no_capacity", 6), ("superseded", None, 5)],
    )
    def test_other_ends(self, api, bedplate, operation, state, error_code, code):
        api.sql(
            "UPDATE operation SET state = :s, error_code = :c, error_detail = 'because', finished_at = now()",
            s=state, c=error_code,
        )  # fmt: skip
        ran = bedplate("operation", "wait", operation)
        assert (ran.code, ran.out) == (code, ""), ran.err
        assert (error_code or "superseded") in ran.err

    def test_steps_are_told_as_they_come(self, api, bedplate, operation):
        api.sql("INSERT INTO run (id, program, subject, shard) SELECT 'run_x', 'project', id, 1 FROM project")

        with _subprocess("operation", "wait", operation) as process:
            for step, left in (("fetch", None), ("prepare", "fetch"), ("serve", "prepare")):
                if left is not None:
                    api.sql(LEAVE_STEP, left=left, step=step)
                else:
                    api.sql("UPDATE run SET step = :s", s=step)
                line = process.stderr.readline()
                if left is not None:
                    assert line.split()[:2] == ["✓", left]
                    line = process.stderr.readline()
                assert line.strip() == f"{step} …"
            api.sql("UPDATE project SET observed_generation = 1")
            assert process.wait(30) == 0
        shown = bedplate("operation", "show", operation)
        assert [line.split()[:2] for line in shown.out.partition("steps\n")[2].splitlines()] == [
            ["✓", "fetch"],
            ["✓", "prepare"],
        ]


def test_event_tail(api, bedplate):
    bedplate("project", "create", "one")
    bedplate("project", "create", "two")
    ran = bedplate("event", "tail", "--after", "0", "--kind", "project.", "--count", "2", "-o", "json")
    assert [json.loads(line)["body"]["name"] for line in ran.out.splitlines()] == ["one", "two"]
    table = bedplate("event", "tail", "--after", "0", "--count", "1")
    assert "project.create" in table.out


def test_cert_init_makes_what_a_client_trusts(bedplate, home):
    from cryptography import x509

    ran = bedplate("cert", "init", "--name", "bedplate.example", "--name", "192.0.2.7")
    assert ran.code == 0, ran.err
    place = Path(ran.out.strip())
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in place.iterdir()} == {
        "ca.key": "0o600", "ca.pem": "0o644", "server.key": "0o600", "server.pem": "0o644",
    }  # fmt: skip
    authority = (place / "ca.pem").read_bytes()
    first = x509.load_pem_x509_certificate((place / "server.pem").read_bytes())
    first.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    assert bedplate("cert", "init").code == 0
    assert (place / "ca.pem").read_bytes() == authority
    second = x509.load_pem_x509_certificate((place / "server.pem").read_bytes())
    assert second.serial_number != first.serial_number
    (place / "ca.key").write_text("nonsense")
    broken = bedplate("cert", "init")
    assert broken.code == 2
    assert "cannot be used" in broken.err


def _subprocess(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "controlplane.cli.main", *arguments]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_interrupted_ends_with_130(api, bedplate):
    with _subprocess("event", "tail", "--after", "0") as process:
        bedplate("project", "create", "one")
        assert "project.create" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read()


def test_version_is_quick_and_light():
    program = (
        "import sys; sys.argv = ['bedplate', 'version']\n"
        "from controlplane.cli import main\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'httpx2', 'sqlalchemy', 'yaml', 'rich', 'asyncio', 'fastapi', 'cryptography'}\n"
        "found = heavy & set(sys.modules)\n"
        "assert not found, found\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, monkeypatch, home):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_BEDPLATE_COMPLETE": f"source_{shell}"}
    argv = [sys.executable, "-m", "controlplane.cli.main"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert "bedplate" in done.stdout, done.stderr
