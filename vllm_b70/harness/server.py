"""Starts and stops a real ``vllm serve``, and says clearly what went wrong when it does not."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from vllm_b70.harness.client import HarnessError, ServerError
from vllm_b70.harness.results import DiskFullError, raise_if_disk_full

_TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024
_PROGRESS_EVERY_S = 10.0
_POLL_EVERY_S = 0.25
_LOW_DISK_BYTES = 1024 * 1024


class PortInUseError(HarnessError):
    """Another program listens on the port; starting would test the wrong server."""


class Server:
    """A server process with its whole process group. Use it as a context manager.

    Args:
        argv: the command, for example ``["vllm", "serve", ...]``. A bare program name is looked
            up beside the running interpreter first, then on the PATH.
        port: the port that ``argv`` makes it listen on.
        log_path: file that receives the server's output; kept after the end.
        env: variables added to this process's environment.
        start_timeout_s: seconds allowed until ``/health`` answers.
        stop_timeout_s: seconds from SIGTERM to SIGKILL.
        progress: receives a line of text now and then while the server starts.

    Raises (on entering):
        PortInUseError: the port is taken.
        ServerError: the program is missing, exits early or does not become healthy in time.
        DiskFullError: the log cannot be written because the disk is full.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        port: int,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 900.0,
        stop_timeout_s: float = 30.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.argv = list(argv)
        self.env = dict(env or {})
        self.port = port
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> str:
        """The shell command that starts the same server by hand."""
        additions = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*additions, shlex.join(self.argv)])

    @property
    def base_url(self) -> str:
        """Address of the server on this machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, negative for a signal; None while it runs or never ran."""
        return None if self._process is None else self._process.poll()

    def __enter__(self) -> Server:
        check_port_free(self.port)
        self._spawn()
        try:
            self._wait_until_healthy()
        except BaseException:
            # Also on Ctrl-C: a server that nobody stops would hold the port and the memory.
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Terminate the process group: SIGTERM, a wait, then SIGKILL. Safe to call twice."""
        process = self._process
        if process is None:
            return
        # The group can outlive its leader: engine workers that lost their parent stay in it.
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None and not _group_alive(process.pid):
                break
            time.sleep(0.05)
        else:
            _signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=self.stop_timeout_s)

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the process exits, at most ``timeout_s`` seconds, and return its code."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=timeout_s)
        return self.exit_code

    def failure(self, reason: str) -> ServerError | DiskFullError:
        """Return an error made of ``reason``, the end of the log and the log's path.

        A full disk is reported as such, for the log's end rarely shows it.
        """
        tail = log_tail(self.log_path)
        if any("No space left on device" in line for line in tail) or self._disk_is_full():
            return DiskFullError(
                f"{reason} The disk is full (log: {self.log_path}): "
                "free some space or choose another directory."
            )
        lines = "\n".join(f"  {line}" for line in tail) or "  (the log is empty)"
        return ServerError(
            f"{reason} The last lines of {self.log_path}:\n{lines}",
            died=self.exit_code is not None,
        )

    def _spawn(self) -> None:
        program = _find_program(self.argv[0])
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("wb") as log:
                log.write(f"$ {self.command}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [program, *self.argv[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.env},
                    # Its own session, so that one signal reaches every worker and none of ours.
                    start_new_session=True,
                )
        except OSError as error:
            raise_if_disk_full(error, self.log_path)
            raise ServerError(f"Cannot start {program}: {error.strerror or error}.") from error

    def _wait_until_healthy(self) -> None:
        start = time.monotonic()
        reported = start
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while True:
                if self.exit_code is not None:
                    raise self.failure(
                        f"The server exited with code {self.exit_code} before it was ready."
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(self.base_url + "/health").status_code == 200:
                        return
                now = time.monotonic()
                if now - start > self.start_timeout_s:
                    raise self.failure(
                        f"The server was not ready after {self.start_timeout_s:g} seconds."
                    )
                if self._progress is not None and now - reported >= _PROGRESS_EVERY_S:
                    self._progress(f"waiting for the server: {now - start:.0f} s")
                    reported = now
                time.sleep(_POLL_EVERY_S)

    def _disk_is_full(self) -> bool:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.log_path.parent).free < _LOW_DISK_BYTES
        return False


def check_port_free(port: int) -> None:
    """Check that nothing listens on ``port`` of this machine.

    Raises:
        PortInUseError: something does, or the port may not be bound.
    """
    for host in ("127.0.0.1", ""):
        with socket.socket() as probe:
            # Lets a port pass that is only in TIME_WAIT from the server before.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                raise PortInUseError(
                    f"Port {port} cannot be used ({error.strerror}): stop the program that "
                    "listens on it, or choose another port."
                ) from error


def log_tail(path: Path, lines: int = _TAIL_LINES) -> list[str]:
    """Return the last ``lines`` lines of a file, or nothing when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _find_program(name: str) -> str:
    if os.sep in name:
        return name
    # The interpreter's own directory first: the harness must test the vLLM it is installed with.
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise ServerError(f"The program {name!r} is not installed beside Python nor on the PATH.")
    return found


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
