"""An IDE's side of https://microsoft.github.io/debug-adapter-protocol, as far as tests need it."""

import json
import socket


class Ide:
    """Attached to a debugger that listens at a port of this host."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._stream = self._socket.makefile("rb")
        self._number = 0
        self._seen = []
        self.ask("initialize", adapterID="test", pathFormat="path")
        attaching = self._send("attach", {"justMyCode": True})
        self.event("initialized")
        self.ask("configurationDone")
        self._response(attaching)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()
        self._socket.close()

    def ask(self, command, **arguments):
        """Make a request, and return what comes back."""
        return self._response(self._send(command, arguments))

    def event(self, name):
        """Wait for an event."""
        return self._next(lambda message: message.get("event") == name).get("body")

    def _send(self, command, arguments):
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return self._number

    def _response(self, number):
        response = self._next(lambda message: message.get("request_seq") == number)
        assert response["success"], response
        return response.get("body")

    def _next(self, is_it):
        while True:
            for message in self._seen:
                if is_it(message):
                    self._seen.remove(message)
                    return message
            self._seen.append(self._read())

    def _read(self):
        nbytes = 0
        while line := self._stream.readline().strip():
            name, _, value = line.partition(b":")
            nbytes = int(value) if name.lower() == b"content-length" else nbytes
        assert nbytes, "the debugger has gone"
        return json.loads(self._stream.read(nbytes))
