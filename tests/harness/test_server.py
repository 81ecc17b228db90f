import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from vllm_b70.harness import server as server_module
from vllm_b70.harness.client import ServerError
from vllm_b70.harness.results import DiskFullError
from vllm_b70.harness.server import PortInUseError, Server, check_port_free, log_tail

FAKE = str(Path(__file__).with_name("fake_vllm.py"))

# A server whose worker, a process of the same group, ignores SIGTERM as a stuck engine does.
STUBBORN = """
import os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
worker = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(1000)"], stdout=subprocess.PIPE)
worker.stdout.readline()
open(sys.argv[2], "w").write(str(worker.pid))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path, free_port: int) -> Make:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def build(argv: list[str] | None = None, **options: object) -> Server:
        fake = [sys.executable, FAKE, "serve", str(tmp_path / "model"), "--port", str(free_port)]
        return Server(
            argv or fake,
            port=free_port,
            log_path=tmp_path / "logs" / "server.log",
            env={"VLLM_B70_STEP_TRACE": str(tmp_path / "a trace.jsonl")},
            **options,  # type: ignore[arg-type]
        )

    return build


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that waits for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_server_starts_answers_and_stops(make: Make) -> None:
    with make() as server:
        assert httpx.get(server.base_url + "/health", trust_env=False).status_code == 200
        assert server.exit_code is None
    assert server.exit_code == -signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.base_url + "/health", trust_env=False)
    assert "fake server, arguments" in server.log_path.read_text()
    server.stop()


def test_the_command_is_what_a_user_would_type(make: Make, tmp_path: Path) -> None:
    server = make(["vllm", "serve", "a model", "--speculative-config", '{"method": "mtp"}'])
    name, *rest = shlex.split(server.command)
    assert name == f"VLLM_B70_STEP_TRACE={tmp_path / 'a trace.jsonl'}"
    assert rest == server.argv
    assert server.command.endswith(
        """vllm serve 'a model' --speculative-config '{"method": "mtp"}'"""
    )


def test_a_port_in_use_is_refused(make: Make, free_port: int) -> None:
    server = make()
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(PortInUseError, match=f"Port {free_port} cannot be used"):
            server.__enter__()
    assert not server.log_path.exists()
    check_port_free(free_port)


def test_an_early_exit_shows_the_end_of_the_log(make: Make) -> None:
    code = "import sys; [print('line', n) for n in range(100)]; sys.exit(7)"
    server = make([sys.executable, "-c", code])
    with pytest.raises(ServerError, match="exited with code 7") as caught:
        server.__enter__()
    message = str(caught.value)
    assert caught.value.died
    assert "line 99" in message and "line 70" in message and "line 69" not in message
    assert str(server.log_path) in message


def test_a_server_that_never_gets_ready_is_stopped(make: Make) -> None:
    lines: list[str] = []
    code = "import time; time.sleep(1000)"
    server = make([sys.executable, "-c", code], start_timeout_s=0.5, progress=lines.append)
    with pytest.raises(ServerError, match="not ready after 0.5 seconds"):
        server.__enter__()
    assert server.exit_code == -signal.SIGTERM


def test_waiting_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_PROGRESS_EVERY_S", 0.0)
    lines: list[str] = []
    code = "import time; time.sleep(1000)"
    server = make([sys.executable, "-c", code], start_timeout_s=0.5, progress=lines.append)
    with pytest.raises(ServerError):
        server.__enter__()
    assert lines and lines[0].startswith("waiting for the server: ")


def test_workers_that_ignore_sigterm_are_killed(make: Make, tmp_path: Path, free_port: int) -> None:
    pid_file = tmp_path / "pid"
    argv = [sys.executable, "-c", STUBBORN, str(free_port), str(pid_file)]
    with make(argv, stop_timeout_s=0.5):
        pid = int(pid_file.read_text())
        assert running(pid)
    deadline = time.monotonic() + 60
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)


def test_an_interrupt_while_starting_leaves_no_server(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make()

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait_until_healthy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server.exit_code is not None


def test_a_missing_program_is_named(make: Make) -> None:
    with pytest.raises(ServerError, match="'no-such-program' is not installed"):
        make(["no-such-program"]).__enter__()
    with pytest.raises(ServerError, match="Cannot start"):
        make(["/no/such/program"]).__enter__()


def test_a_full_disk_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('OSError: [Errno 28] No space left on device')"
    with pytest.raises(DiskFullError, match="disk is full"):
        make([sys.executable, "-c", code]).__enter__()
    monkeypatch.setattr(server_module, "_LOW_DISK_BYTES", 2**80)
    with pytest.raises(DiskFullError, match="disk is full"):
        make([sys.executable, "-c", "raise SystemExit(1)"]).__enter__()


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\n" * 100_000 + b"last")
    assert log_tail(path, 2) == ["\ufffd", "last"]
    assert log_tail(tmp_path / "missing") == []


def test_the_whole_group_is_in_its_own_session(make: Make) -> None:
    with make() as server:
        process = server._process
        assert isinstance(process, subprocess.Popen)
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
