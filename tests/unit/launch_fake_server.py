"""A stand-in for SGLang's server, as far as `launch/` looks: it starts in a second and answers by rule.

    python launch_fake_server.py [--die] [--deaf] [--offset N] ... --host HOST --port PORT

It answers a prompt `ids` with `ids[0] + N, ids[0] + N + 1, ids[0] + N + 2`, in two steps of which the first accepts one
draft. Asked for a trace of widths, it writes that both were of width 4. `--die` ends at once; `--deaf` ignores SIGTERM.
It has a child process, like the real one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--die", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--offset", type=int, default=0)
parser.add_argument("--announce", action="store_true")
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
options = parser.parse_args()
folder = os.environ.get("SGLANG_DFLASH_WIDTH_TRACE")
trace = None
if folder:
    Path(folder).mkdir(parents=True, exist_ok=True)
    trace = Path(folder, f"{os.getpid()}.jsonl").open("w", buffering=1)  # noqa: SIM115


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            self.answer({})
        elif not body.get("input_ids"):
            self.answer({"error": "empty prompt"}, status=400)
        else:
            first = body["input_ids"][0] + options.offset
            tokens = [first, first + 1, first + 2]
            meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1}
            whole = {"output_ids": tokens, "text": "", "meta_info": meta}
            if trace is not None:
                for accepted in (1, 0):
                    step = {"s": 0.0, "width": 4, "accepted": {body.get("rid", "someone"): accepted}}
                    trace.write(json.dumps(step) + "\n")
            parts = [whole | {"output_ids": tokens[:n]} for n in (1, 3)]
            if body.get("stream"):
                events = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(events.encode())
            else:
                self.answer(whole)

    def answer(self, body: dict, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


if options.die:
    sys.exit("the checkpoint is not there")
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if options.announce:
    print("sglang-dflash 0 serves DFLASH: everything", flush=True)
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
