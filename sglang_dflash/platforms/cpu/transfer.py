"""Transfer of a prompt's K/V from a prefill to a decode server, over loopback: a replacement for Mooncake's engine.

SGLang's own code does handshake, queues and polling. The engine only writes into another process's memory. If
Mooncake's package and system libraries are installed, Mooncake's own engine is used, which also runs on a CPU, over
TCP. With the engine of this file both servers must run on the same machine.
"""

import ctypes
import socket
import socketserver
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace

HEAD, PART = struct.Struct("<I"), struct.Struct("<QQ")  # number of parts; a part's address and length in bytes
DONE = b"\x01"
HOST = "127.0.0.1"


class TransferEngine:
    """Engine with those methods of Mooncake's engine that SGLang calls. A status of 0 is success, -1 is failure."""

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}  # address -> number of bytes from there that other processes may write

    def initialize(self, hostname: str, handshake: str, protocol: str, device: str) -> int:
        engine = self

        class Writes(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                head = self.rfile.read(HEAD.size)
                if not head:  # `send_probe` sends no bytes
                    return
                (n_parts,) = HEAD.unpack(head)
                parts = [PART.unpack(self.rfile.read(PART.size)) for _ in range(n_parts)]
                if not all(engine.holds(*part) for part in parts):
                    return  # the sender gets no answer
                for address, length in parts:
                    if self.rfile.readinto(memory(address, length)) != length:
                        return
                self.wfile.write(DONE)

        self.server = socketserver.ThreadingTCPServer((HOST, 0), Writes)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, name="transfers", daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self.server.server_address[1]

    def holds(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self.regions.items())

    def register_memory(self, address: int, length: int) -> int:
        self.regions[address] = length
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self.regions.pop(address, None) else -1

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.regions.update(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        return min(map(self.unregister_memory, addresses), default=0)

    def transfer_sync_write(self, peer: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(peer, [source], [target], [length])

    def batch_transfer_sync_write(self, peer: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        """Copy lengths[i] bytes from address sources[i] here to address targets[i] in the process at `peer`."""
        try:
            with self._connect(peer) as connection:
                parts = b"".join(PART.pack(*part) for part in zip(targets, lengths, strict=True))
                connection.sendall(HEAD.pack(len(lengths)) + parts)
                for part in zip(sources, lengths, strict=True):
                    connection.sendall(memory(*part))
                return 0 if connection.recv(1) == DONE else -1
        except OSError:  # the peer has ended; SGLang fails the request
            return -1

    def send_probe(self, peer: str) -> int:
        try:
            self._connect(peer).close()
        except OSError:
            return -1
        return 0

    def _connect(self, peer: str) -> socket.socket:
        return socket.create_connection((HOST, int(peer.rsplit(":", 1)[1])), timeout=30)


def memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class Event:
    """Event of the only stream. The event is always complete."""

    def record(self, stream: object = None) -> None:
        return

    def synchronize(self) -> None:
        return


CUDA = SimpleNamespace(Event=Event, current_stream=lambda: None)


def install() -> None:
    """Install this engine as `mooncake.engine`, unless Mooncake is installed."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError:
        engine = ModuleType("mooncake.engine")
        vars(engine)["TransferEngine"] = TransferEngine
        sys.modules["mooncake"], sys.modules["mooncake.engine"] = ModuleType("mooncake"), engine
