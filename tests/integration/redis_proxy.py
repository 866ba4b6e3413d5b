"""A proxy whose connections break after the server has executed a request and before its answer arrives."""

import random
import select
import socket
import threading


class LossyProxy:
    """Forwards to a local port; every connection breaks after some answers, and drops the next one."""

    def __init__(self, port: int, seed: int):
        self.target, self.random = port, random.Random(seed)
        self.broken = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self):
        self.open = False
        self.listener.close()

    def _accept(self):
        while self.open:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            left = self.random.randint(3, 12)
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for side in ready:
                    content = side.recv(2**16)
                    if not content:
                        return
                    if side is client:
                        server.sendall(content)
                    elif left > 0:
                        left -= 1
                        client.sendall(content)
                    else:
                        self.broken += 1  # the answer is dropped
                        return
