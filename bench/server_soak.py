#!/usr/bin/env python3
"""A soak of `kvlab serve`: minutes of clients who come and go, some of whom behave badly.

    ./kvlab get smollm2
    python3 bench/server_soak.py --minutes=5                (Python's own library is enough)
    python3 bench/server_soak.py --minutes=2 --tiny         (a random model: many requests)

First it asks a list of different requests one by one: texts, ids and chats, greedy and drawn
with seeds, several policies and budgets, streamed or not, with log-probabilities. Then
`--clients` threads ask them at the same time, in random order, while others leave in the
middle of a stream, send half a request, wrong JSON or too much, read nothing, or only hold
connections open. Every answer must be the one that the request got alone; the memory of the
process must not grow after the first quarter; and at the end nothing may be left in the
server. The exit status is 1 if something was wrong.

Greedy answers of a batch may differ from those alone where two tokens are as good as equal,
because a batch rounds otherwise (docs/generation.md); in f32 that is rare. Such a request is
asked alone again, and the difference is reported with the log-probabilities at that place.
"""
import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXT = ("And God said, Let there be light: and there was light. And God saw the light, that it "
        "was good: and God divided the light from the darkness. ")
POLICIES = [(None, None), ("full", None), ("quest", {"ratio": 0.2}), ("quest", {"ratio": 0.5}),
            ("streaming", {"tokens": 64}), ("block_mean", {"ratio": 0.3})]
NEAR = 1e-3  # log-probabilities that are as good as equal


def requests_of(count, seed):
    """Requests that differ in all that a request may say."""
    rng, out = random.Random(seed), []
    for i in range(count):
        body = {"max_tokens": rng.choice([1, 4, 8, 16, 24]), "ignore_eos": True,
                "temperature": rng.choice([0, 0, 0.7, 1.0]), "seed": rng.randrange(1 << 30)}
        if body["temperature"]:
            body.update(rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}]))
        policy, options = rng.choice(POLICIES)
        if policy:
            body["policy"] = policy
        if options:
            body["policy_options"] = options
        words = f"Note {i}. " + TEXT * rng.choice([1, 1, 2, 6])
        path = "/v1/completions"
        if rng.random() < 0.3:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words
            if rng.random() < 0.3:
                body["logprobs"] = 2
            if rng.random() < 0.2:
                body["n"] = 2
        if rng.random() < 0.2:
            body["stop"] = [" the", "\n"]
        out.append((path, body))
    return out


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


class Client:
    def __init__(self, host, port):
        self.host, self.port, self.connection = host, port, None

    def post(self, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        for again in range(2):  # the server may have ended a connection that was idle
            self.connection = self.connection or http.client.HTTPConnection(
                self.host, self.port, timeout=600)
            try:
                self.connection.request("POST", path, data, {"Content-Type": "application/json"})
                return self.connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError):
                self.connection.close()
                self.connection = None
                if again:
                    raise
        return None

    def ask(self, path, body):
        """The status, and the texts of all answers."""
        answer = self.post(path, body)
        if not body.get("stream") or answer.status != 200:
            text = json.loads(answer.read())
            if answer.status != 200:
                return answer.status, text["error"]["code"]
            return 200, [text_of(choice) for choice in text["choices"]]
        texts = [""] * body.get("n", 1)
        done = False
        for event in re.findall(rb"data: (.*)\n\n", answer.read()):
            done = event == b"[DONE]"
            for choice in [] if done else json.loads(event)["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                    "content") or ""
        return (200 if done else 0), texts


class Soak:
    def __init__(self, asked, url, pid):
        self.asked, self.pid = asked, pid
        self.host, port = re.match(r"http://(.*):(\d+)", url).groups()
        self.port = int(port)
        self.lock, self.counts, self.different, self.wrong = threading.Lock(), {}, [], []
        self.end = 0
        self.resident = []

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def alone(self, requests):
        client = Client(self.host, self.port)
        return [client.ask(path, body) for path, body in requests]

    # ---- those who ask ----

    def good(self, seed, requests, expected):
        rng, client = random.Random(seed), Client(self.host, self.port)
        while time.monotonic() < self.end:
            i = rng.randrange(len(requests))
            path, body = requests[i]
            if rng.random() < 0.4:
                body = dict(body, stream=True)
            status, texts = client.ask(path, body)
            if status == 429:
                self.count("429, asked again")
                time.sleep(0.2)
            elif (status, texts) != expected[i]:
                with self.lock:
                    self.different.append((i, status, texts))
                self.count("different")
            else:
                self.count("equal")

    def raw(self):
        return socket.create_connection((self.host, self.port), timeout=60)

    def bad(self, seed, _, __):
        rng = random.Random(seed)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        held = []
        while time.monotonic() < self.end:
            kind = rng.choice(["leaves", "half", "json", "large", "silent", "idle", "utf8"])
            try:
                if kind == "leaves" or kind == "silent":
                    body = json.dumps({"prompt": TEXT * 3, "max_tokens": 150, "stream": True,
                                       "ignore_eos": True, "temperature": 0}).encode()
                    s = self.raw()
                    s.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    if kind == "leaves":
                        s.recv(rng.choice([1, 400, 2000]))
                        s.close()
                    else:
                        held.append(s)
                elif kind == "half":
                    s = self.raw()
                    s.sendall(head + b"Content-Length: 90\r\n\r\n{\"prompt\": ")
                    held.append(s)
                elif kind == "idle":
                    held += [self.raw() for _ in range(20)]
                elif kind == "large":
                    s = self.raw()
                    s.sendall(head + b"Content-Length: 1073741824\r\n\r\n" + b"a" * 1000)
                    self.must(s.recv(12).endswith(b"413"), kind)
                    s.close()
                else:
                    body = b'{"prompt": ' if kind == "json" else b'{"prompt": "\xff"}'
                    s = self.raw()
                    s.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    self.must(s.recv(12).endswith(b"400"), kind)
                    s.close()
                self.count(kind)
            except (ConnectionError, TimeoutError, socket.timeout) as problem:
                self.count(f"{kind}: {type(problem).__name__}")
            while len(held) > 60:
                held.pop(0).close()
            time.sleep(rng.random() * (0.02 if self.asked.tiny else 1))
        for s in held:
            s.close()

    def must(self, is_so, what):
        if not is_so:
            with self.lock:
                self.wrong.append(what)

    def watch(self):
        begin = time.monotonic()
        while time.monotonic() < self.end:
            with open(f"/proc/{self.pid}/statm") as file:
                self.resident.append((time.monotonic() - begin,
                                      int(file.read().split()[1]) * 4096 / 1e6))
            time.sleep(1)

    # ---- the whole ----

    def run(self, requests, expected):
        self.end = time.monotonic() + 60 * self.asked.minutes
        work = [threading.Thread(target=self.watch)]
        for i in range(self.asked.clients):
            work.append(threading.Thread(target=self.good, args=(i, requests, expected)))
        for i in range(self.asked.bad):
            work.append(threading.Thread(target=self.bad, args=(1000 + i, requests, expected)))
        for one in work:
            one.start()
        for one in work:
            one.join()

    def health(self):
        c = http.client.HTTPConnection(self.host, self.port, timeout=60)
        c.request("GET", "/health")
        return json.loads(c.getresponse().read())

    def metrics(self):
        c = http.client.HTTPConnection(self.host, self.port, timeout=60)
        c.request("GET", "/metrics")
        text = c.getresponse().read().decode()
        return {name: float(value) for name, value in re.findall(r"^(kvlab_\S+) (\S+)$", text, re.M)}


def is_tie(soak, request, first, second):
    """Whether two greedy answers part where the two tokens are as good as equal."""
    path, body = request
    if path != "/v1/completions":
        return False
    same = os.path.commonprefix([first, second])
    client = Client(soak.host, soak.port)
    probe = dict(body, logprobs=2, stream=False, n=1)
    probe.pop("stop", None)
    answer = json.loads(client.post(path, probe).read())["choices"][0]["logprobs"]
    at = 0
    for token, top in zip(answer["tokens"], answer["top_logprobs"]):
        if at + len(token) > len(same):
            best = sorted(top.values())
            return best[-1] - best[-2] < NEAR
        at += len(token)
    return False


TINY = """
package.loaded["spec.temporary"] = {} -- which needs busted
local root, folder = kv.paths.root, kv.command_line.set.folder
package.path = root .. "/?.lua;" .. package.path
local files = require "kvlab.files"
require("spec.text_models").write_tokenizer(folder, 128)
for _, name in ipairs { "config.json", "model.safetensors" } do
  files.write(folder .. "/" .. name, files.read(root .. "/spec/data/hf/llama/" .. name))
end
"""


def make_tiny(program, folder):
    """A folder with the specs' random Llama, which has a token for each character."""
    with open(f"{folder}/make.lua", "w") as file:
        file.write('local kv = require "kvlab"\n' + TINY)
    subprocess.run([program, "run", f"{folder}/make.lua", "--set", f"folder={folder}"],
                   check=True)
    return folder


def start(asked):
    words = [asked.kvlab, "serve", asked.model, "--port=0", "--quiet", "--dtype=f32",
             "--policy=quest", "--set=ratio=0.1", "--set=limits.arrival_s=10",
             f"--set=engine.max_seqs={asked.max_seqs}"]
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(words, stderr=log, cwd=ROOT)
    while True:
        log.seek(0)
        found = re.search(r"answers at (http://\S+)/v1", log.read())
        if found:
            return process, found.group(1)
        if process.poll() is not None:
            log.seek(0)
            sys.exit(f"the server did not start: {log.read()}")
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--bad", type=int, default=3, help="clients that behave badly")
    parser.add_argument("--requests", type=int, default=60, help="different ones")
    parser.add_argument("--max-seqs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "kvlab"), help="the program")
    parser.add_argument("--tiny", action="store_true", help="a random model, short texts")
    asked = parser.parse_args()
    if asked.tiny:
        global TEXT
        TEXT = "And God said: "
        folder = tempfile.TemporaryDirectory()
        asked.model = make_tiny(asked.kvlab, folder.name)
    process, url = start(asked)
    soak = Soak(asked, url, process.pid)
    try:
        requests = requests_of(asked.requests, asked.seed)
        expected = soak.alone(requests)
        refused = [answer for answer in expected if answer[0] != 200]
        print(f"alone: {len(requests)} requests, {len(refused)} refused", flush=True)
        soak.run(requests, expected)
        deadline = time.monotonic() + 60
        while soak.health()["running"] + soak.health()["waiting"] and time.monotonic() < deadline:
            time.sleep(0.2)
        for what in sorted(soak.counts):
            print(f"{soak.counts[what]:7} {what}")
        ties = 0
        for i, status, texts in soak.different:
            first = expected[i][1]
            tie = status == 200 and requests[i][1]["temperature"] == 0 and all(
                a == b or is_tie(soak, requests[i], a, b) for a, b in zip(first, texts))
            ties += tie
            if not tie:
                print(f"different: request {i} {requests[i][1].get('policy')}: status {status}, "
                      f"{texts!r} where alone {first!r}")
        after_alone = soak.alone(requests)
        later = sum(a != b for a, b in zip(expected, after_alone))
        metrics, health = soak.metrics(), soak.health()
        settled = soak.resident[len(soak.resident) // 4:]
        quarter, last = settled[0][1], max(mb for _, mb in settled[-10:])
        print(f"ties: {ties} of {len(soak.different)} differences; alone again afterwards: "
              f"{later} of {len(requests)} differ")
        print("resident MB at " + ", ".join(
            f"{t:.0f} s: {mb:.1f}" for t, mb in soak.resident[::max(1, len(soak.resident) // 12)]))
        print(f"resident: {quarter:.1f} MB after a quarter, {last:.1f} MB at the end")
        print(f"answers {metrics['kvlab_generated_tokens_total']:.0f} tokens, prompts "
              f"{metrics['kvlab_prompt_tokens_total']:.0f}, steps {metrics['kvlab_steps_total']:.0f}, "
              f"connections {metrics['kvlab_connections_total']:.0f}, "
              f"clients that left {metrics['kvlab_disconnects_total']:.0f}, requests that did not "
              f"arrive {metrics['kvlab_requests_too_slow_total']:.0f}; left: {health}, "
              f"{metrics['kvlab_cache_blocks'] - metrics['kvlab_cache_blocks_available']:.0f} blocks")
        is_fine = (len(refused) == 0 and ties == len(soak.different) and later == 0
                   and not soak.wrong and last < quarter * 1.02 + 8
                   and metrics["kvlab_cache_blocks_available"] == metrics["kvlab_cache_blocks"]
                   and health["running"] == health["waiting"] == 0)
        print("fine" if is_fine else f"WRONG {soak.wrong}")
        return 0 if is_fine else 1
    finally:
        process.send_signal(2)
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
