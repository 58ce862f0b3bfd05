"""A stand-in for SGLang's server, as far as the benchmarks look: it starts in a second and answers by rule.

    python launch_fake_server.py [--die] [--deaf] [--offset N] ... --host HOST --port PORT

It answers a prompt `ids` with `ids[0] + N, ids[0] + N + 1, ids[0] + N + 2`; of the first, half a nat more likely than
the second, it also tells log-probabilities. `--die` ends at once; `--deaf` ignores SIGTERM. It has a child process,
like the real one.

Asked by chat, it answers the first three letters of the question, or token ids, plus N, in two steps of which the first
accepts one draft, unless the question says to refuse. It is a server of `--kind`, and as SGLang's it says what our
worker says (`--announce`, or the environment variable that selects it). `--stingy`: a stream does not end with its
usage. In the environment `FAKE_OFFSET` is N too, and `FAKE_STREAM` what a stream says instead.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--die", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--offset", type=int, default=int(os.environ.get("FAKE_OFFSET", "0")))
parser.add_argument("--announce", action="store_true")
parser.add_argument("--kind", choices=["sglang", "vllm", "openai"], default="sglang")
parser.add_argument("--stingy", action="store_true")
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
options, _ = parser.parse_known_args()  # the rest are flags of the server it stands in for
announce = options.announce or os.environ.get("SGLANG_DFLASH_WORKER") == "plugin"
n_steps = 0  # of all answers


def told() -> dict[str, object]:
    """What each kind of server has at GET."""
    paths: dict[str, object] = {"/v1/models": {"data": [{"id": "fake-model"}]}, "/health": {"status": "ok"}}
    if options.kind == "sglang":
        width = {"policy": "auto", "n_steps": {"4": n_steps}}
        state = {"dflash": {"version": "0", "width": width}} if announce else {}
        paths["/server_info"] = {"internal_states": [state], "version": "0.5.23", "speculative_algorithm": "DFLASH"}
    if options.kind == "vllm":
        accepted = "vllm:spec_decode_num_accepted_tokens"
        per_position = f'{accepted}_per_pos_total{{engine="0",position="0"}} {n_steps // 2}\n'
        counters = f"vllm:spec_decode_num_drafts_total {n_steps}\n{accepted}_total {n_steps // 2}\n{per_position}"
        paths |= {"/version": {"version": "1.0"}, "/metrics": counters}
    return paths


def chat(body: dict) -> dict:
    """An unstreamed answer: two steps, of which the first accepted one draft."""
    prompt_ids = body.get("input_ids") or [ord(letter) for letter in body["messages"][-1]["content"]]
    token_ids = [token + options.offset for token in prompt_ids[:3]]
    choice = {"message": {"content": f"the question {options.offset}"}}
    if options.kind == "vllm":
        choice["token_ids"] = token_ids
    if options.kind == "sglang":
        meta = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [1, 1]}
        choice |= {
            "response_token_ids": token_ids,
            "prompt_token_ids": prompt_ids,
            "meta_info": meta if announce else {},
        }
    return {"choices": [choice], "usage": {"completion_tokens": 3, "prompt_tokens": len(prompt_ids)}}


def chat_events(body: dict) -> list[dict]:
    usage = [] if options.stingy else [{"choices": [], "usage": chat(body)["usage"]}]
    words = ("", "the ", os.environ.get("FAKE_STREAM", f"question {options.offset}"))
    return [*({"choices": [{"delta": {"content": word}}]} for word in words), *usage]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body go out one by one

    def do_GET(self) -> None:
        found = told().get(self.path)
        self.answer({"error": "no such page"} if found is None else found, status=404 if found is None else 200)

    def do_POST(self) -> None:
        global n_steps
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path.startswith("/flush_cache"):
            self.answer({}, status=200 if options.kind == "sglang" else 404)
        elif self.path == "/v1/chat/completions":
            n_steps += 2
            if "refuse" in body["messages"][-1]["content"]:
                self.answer({"error": "too long"}, status=400)
            elif body.get("stream"):
                self.stream(chat_events(body))
            else:
                self.answer(chat(body))
        elif not body.get("input_ids"):
            self.answer({"error": "empty prompt"}, status=400)
        else:
            first = body["input_ids"][0] + options.offset
            tokens = [first, first + 1, first + 2]
            meta = {"output_top_logprobs": [[[-0.5, first, None], [-1.0, first + 1, None]]]}
            self.answer({"output_ids": tokens, "text": "", "meta_info": meta})

    def stream(self, events: list[dict]) -> None:
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send(lines.encode(), 200)

    def answer(self, body: object, status: int = 200) -> None:
        self.send((body if isinstance(body, str) else json.dumps(body)).encode(), status)

    def send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if options.die:
    sys.exit("the checkpoint is not there")
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if announce:
    print("sglang-dflash 0 serves DFLASH: everything", flush=True)
ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
