#!/usr/bin/env python3
"""How long large requests hold up the other clients of `kvlab serve`.

    python3 bench/server_stall.py                      (Python's own library is enough)
    python3 bench/server_stall.py --model=smollm2 --only="one word"

One client reads a stream of tokens. Meanwhile another one sends a request of each kind, and
the longest time between two parts of the stream is printed, with what the request got. The
model is the specs' random Llama with the tokenizer of spec/data/tokenizers/llama3.json, whose
steps take about a millisecond; its context is set to --context tokens.
"""
import argparse
import http.client
import json
import os
import re
import subprocess
import tempfile
import threading
import time

import server_soak
from server_soak import ROOT

MB = 1 << 20
TEXT = "And God said, Let there be light: and there was light. "


def words(count):
    return (TEXT * (count // len(TEXT) + 1))[:count]


def completion(prompt, **more):
    return "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 1, **more})


def kinds():
    """Name -> path and body."""
    yield "nothing", None
    yield "3 MB of words", completion(words(3 * MB))
    yield "one word of 1 MB", completion("a" * MB)
    yield "one word of 3 MB", completion("a" * (3 * MB))
    yield "3 MB of spaces", completion(" " * (3 * MB))
    yield "3 MB, 60 prompts", completion([words(8000)] * 59 + [words(3 * MB - 60 * 8000)])
    yield "3 MB of token ids", completion([5] * (3 * MB // 3))
    yield "3 MB of empty lists", completion([[]] * (3 * MB // 4))
    yield "3 MB of fields", ("/v1/completions", json.dumps(
        {f"k{i:07x}": 1 for i in range(3 * MB // 13)}))
    yield "3 MB that is no JSON", ("/v1/completions", '{"prompt": [1' + ",1\n" * MB + "x]}")
    yield "3 MB of a chat", ("/v1/chat/completions", json.dumps(
        {"max_tokens": 1, "messages": [{"role": "user", "content": words(3000)}] * 1001}))
    yield "3 MB of calls in a chat", ("/v1/chat/completions", json.dumps(
        {"max_tokens": 1, "messages": [{"role": "user", "content": "a", "tool_calls": [
            {"function": {"name": "f", "arguments": json.dumps({"x": words(3000)})}}]}] * 970}))
    yield "tokenize 3 MB of words", ("/tokenize", json.dumps({"prompt": words(3 * MB)}))
    yield "tokenize one word of 1 MB", ("/tokenize", json.dumps({"prompt": "a" * MB}))
    yield "detokenize 1 000 000 ids", ("/detokenize", json.dumps({"tokens": [64] * 1000000}))
    yield "accents, 200 KB, no end", ("/tokenize", json.dumps(
        {"prompt": "e" + "\u0301\u0316" * 50000}, ensure_ascii=False))
    echoed = {"prompt": [5, 6, 7, 8] * 1000, "echo": True, "logprobs": 20}
    yield "echo with log-probabilities", completion(**echoed)
    yield "the same, streamed", completion(**echoed, stream=True)
    yield "4 answers with them", completion([5, 6, 7], max_tokens=1000, n=4, logprobs=20,
                                            ignore_eos=True)


MODEL = """
package.loaded["spec.temporary"] = {} -- which needs busted
local root, set = kv.paths.root, kv.command_line.set
package.path = root .. "/?.lua;" .. package.path
local files, json = require "kvlab.files", require "kvlab.json"
local from, to = root .. "/spec/data/hf/llama/", set.folder .. "/"
local config = json.decode(files.read(from .. "config.json"))
config.max_position_embeddings = tonumber(set.context)
files.write(to .. "config.json", json.encode(config))
files.write(to .. "model.safetensors", files.read(from .. "model.safetensors"))
local t = json.decode(files.read(root .. "/spec/data/tokenizers/llama3.json"))
if set.normal then t.normalizer = { type = set.normal } end
files.write(to .. "tokenizer.json", json.encode(t))
files.write(to .. "tokenizer_config.json", json.encode {
  chat_template = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    .. "\\n\\n{{ m.content | trim }}<|eot_id|>{% endfor %}" })
"""


def make_model(program, folder, context):
    with open(f"{folder}/make.lua", "w") as file:
        file.write('local kv = require "kvlab"\n' + MODEL)
    subprocess.run([program, "run", f"{folder}/make.lua", "--set", f"folder={folder}", "--set",
                    f"context={context}", "--set", "normal=NFC"], check=True)
    return folder


class Stream(threading.Thread):
    """Reads a stream of tokens, and notes when each part came."""

    def __init__(self, host, port):
        super().__init__(daemon=True)
        self.times, self.end, self.host, self.port = [], False, host, port

    def run(self):
        while not self.end:
            c = http.client.HTTPConnection(self.host, self.port, timeout=600)
            c.request("POST", "/v1/completions", json.dumps(
                {"prompt": [5, 6, 7], "max_tokens": 2000, "stream": True, "ignore_eos": True,
                 "temperature": 0}))
            answer = c.getresponse()
            while not self.end and answer.readline():
                self.times.append(time.monotonic())
            c.close()

    def longest(self, since):
        times = [t for t in self.times if t >= since]
        return max(b - a for a, b in zip(times, times[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--only", default="", help="kinds that have this in their names")
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "kvlab"), help="the program")
    asked = parser.parse_args()
    asked.max_seqs = 8
    folder = tempfile.TemporaryDirectory()
    asked.model = asked.model or make_model(asked.kvlab, folder.name, asked.context)
    process, url = server_soak.start(asked)
    host, port = re.match(r"http://(.*):(\d+)", url).groups()
    stream = Stream(host, int(port))
    try:
        stream.start()
        while len(stream.times) < 200:
            time.sleep(0.01)
        print(f"{'request':26} {'status':>6} {'took':>8} {'longest gap':>12}  error")
        for name, request in kinds():
            if asked.only not in name:
                continue
            begin, status, code = time.monotonic(), "", ""
            if request:
                c = http.client.HTTPConnection(host, int(port), timeout=600)
                c.request("POST", request[0], request[1].encode())
                answer = c.getresponse()
                status, body = answer.status, answer.read()
                error = json.loads(body)["error"] if status != 200 else None
                code = error and (error["code"] or error["message"]) or ""
            else:
                time.sleep(2)
            took = time.monotonic() - begin
            time.sleep(0.3)
            gap = stream.longest(begin - 0.1)
            print(f"{name:26} {status:>6} {took:7.2f}s {1000 * gap:9.0f} ms  {code}", flush=True)
    finally:
        stream.end = True
        process.send_signal(2)
        process.wait(60)


if __name__ == "__main__":
    main()
