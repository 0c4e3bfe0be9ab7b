"""``fresh(code)``: run code as in a new process that has imported torch and nothing of ours.

Importing torch takes seconds, so one process imports it once and forks for each piece of code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchcompat

SERVER = """
import json, os, sys, tempfile, traceback
import torch, packaging.version
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            code = 0
            try:
                exec(compile(json.loads(line), "<fresh>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        output.seek(0)
        print(json.dumps([status, output.read()]), flush=True)
"""


@pytest.fixture(scope="session")
def _server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    environment = dict(os.environ, PYTHONPATH=str(Path(torchcompat.__file__).parent.parent))
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=str(folder),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        yield server
        server.stdin.close()


@pytest.fixture
def fresh(_server):
    """Run code in a fork of a process with torch; return its output, or fail with it."""

    def run(code: str) -> str:
        _server.stdin.write(json.dumps(code) + "\n")
        _server.stdin.flush()
        status, output = json.loads(_server.stdout.readline())
        if status:
            pytest.fail(f"{code}\n{output}")
        return output

    return run
