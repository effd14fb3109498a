"""What a program that a model wrote can do on this host, in the sandbox of `slime.agent.sandbox.python_code`.

python3 -m examples.retool.tool_sandbox            # try it, and print it
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from slime.agent.sandbox.protocol import SandboxError
from slime.agent.sandbox.python_code import Limits, run_python

PROBES = {
    "read /etc/passwd": "open('/etc/passwd').read()",
    "write into /var/tmp": "import tempfile; tempfile.TemporaryFile(dir='/var/tmp')",
    "reach the network": "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)",
    "use another process's loopback": "import socket; socket.socket().connect(('127.0.0.1', PORT))",
    "start a process": "import os; os.fork()",
    "start a thread": "import threading; threading.Thread(target=print).start()",
    "see other processes": "import os; os.kill(PID, 0)",
    "take 1 GiB of memory": "bytearray(1 << 30)",
    "take memory that is not counted": "import os; os.memfd_create('m')",
    "share memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
    "make namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


async def probe(limits: Limits) -> dict[str, bool]:
    """What of `PROBES` a program in this sandbox can do on this host."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    try:
        results = {}
        for name, code in PROBES.items():
            code = code.replace("PORT", port).replace("PID", str(os.getpid()))
            results[name] = (await run_python(code, limits)).ok
        return results
    finally:
        server.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-jail", action="store_true", help="limits only, as --tool-no-jail")
    args = parser.parse_args()
    try:
        found = asyncio.run(probe(Limits(jail=not args.no_jail)))
    except SandboxError as error:
        sys.exit(f"tool_sandbox.py: {error}")
    for name, possible in found.items():
        print(f"{name:<32} {'POSSIBLE' if possible else 'refused'}")


if __name__ == "__main__":
    main()
