"""Processes that are forks of one which has imported all: that takes seconds each."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

# Forks for each request; a fork goes on below, as a process of its own would.
SERVER = """
import json, os, select, socket, sys

def next_request(link):
    children = set()
    while True:
        if select.select([link], [], [], 0.02)[0]:
            message, fds, *_ = socket.recv_fds(link, 1 << 20, 1)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                link.close()
                os.dup2(fds[0], 1), os.dup2(fds[0], 2), os.close(fds[0])
                return json.loads(message)
            os.close(fds[0])
            children.add(pid)
            link.send(json.dumps({"pid": pid}).encode())
        for pid in [*children]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                link.send(json.dumps({"pid": pid, "code": code}).encode())

request = next_request(socket.socket(fileno=int(sys.argv[1])))
os.environ.update(request["environment"])
sys.argv[1:] = request["arguments"]
exec(request["code"])
"""


class Forks:
    """A process that has run ``code``, and forks."""

    def __init__(self, code: str, environment: Mapping[str, str]):
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", code + SERVER, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.ended: dict[int, int] = {}  # exit statuses by process number

    def start(
        self, code: str, arguments: list[str], environment: Mapping[str, str]
    ) -> "Fork":
        """A fork that runs ``code``."""
        ours, theirs = os.pipe()
        request = {"code": code, "arguments": arguments, "environment": environment}
        socket.send_fds(self.link, [json.dumps(request).encode()], [theirs])
        os.close(theirs)
        while "code" in (message := self._read()):
            pass
        return Fork(self, message["pid"], ours)

    def _read(self) -> dict[str, int]:
        text = self.link.recv(1 << 16)
        if not text:
            raise ChildProcessError(f"the server ended: {self.process.wait()}")
        message = json.loads(text)
        if "code" in message:
            self.ended[message["pid"]] = message["code"]
        return message

    def poll(self) -> None:
        """Reads what there is."""
        while select.select([self.link], [], [], 0)[0]:
            self._read()

    def wait(self, pid: int) -> int:
        while pid not in self.ended:
            self._read()
        return self.ended[pid]

    def close(self) -> None:
        self.link.close()
        self.process.wait()


class Fork:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, server: Forks, pid: int, stdout: int):
        self.server, self.pid = server, pid
        self.stdout: Any = os.fdopen(stdout)

    @property
    def returncode(self) -> int | None:
        return self.server.ended.get(self.pid)

    def poll(self) -> int | None:
        self.server.poll()
        return self.returncode

    def wait(self) -> int:
        return self.server.wait(self.pid)

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """What else it prints until it ends; killed if it has not by then."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with self.stdout:
            printed = self.stdout.read()
        self.wait()
        timer.cancel()
        return printed, None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
