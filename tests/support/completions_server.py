"""A small server with OpenAI's completions API, which runs as a process of its own. Replies are a function of the
prompt.

    python completions_server.py FOLDER

Writes its port to FOLDER/port, and a line per request to FOLDER/requests.jsonl. The first request fails with 503. A
prompt that contains token 60 is refused with 400. If FOLDER/no_ids exists, only texts are returned.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")


def reply(prompt: list[int]) -> list[int]:
    """Returns two tokens and the token that ends the turn."""
    return [10 + sum(prompt) % 40, 10 + len(prompt) % 40, 2]


class Handler(BaseHTTPRequestHandler):
    served = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.served += 1
        if Handler.served == 1:
            self.send(503, {"error": "still loading"})
        elif 60 in body["prompt"]:
            self.send(400, {"error": "I will not say that"})
        else:
            with open(FOLDER / "requests.jsonl", "a") as log:
                log.write(json.dumps({"path": self.path, **body}) + "\n")
            ids = reply(body["prompt"])
            choice = {"text": " ".join(f"w{i - 8}" for i in ids[:-1]), "finish_reason": "stop"}
            if not (FOLDER / "no_ids").exists():
                choice["token_ids"] = ids
            self.send(200, {"choices": [choice]})

    def send(self, code: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    (FOLDER / "port.partial").write_text(str(server.server_port))
    (FOLDER / "port.partial").rename(FOLDER / "port")
    server.serve_forever()
