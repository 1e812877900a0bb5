#!/usr/bin/env python3
"""Clients that nobody here wrote, against `kvlab serve`: curl, the Python package openai,
lm-evaluation-harness (its `local-completions`) and a browser.

    ./kvlab get smollm2
    pip install openai 'lm-eval[api]'            (in an environment of its own)
    python3 tools/server_clients.py [--model=smollm2] [--only=curl,openai,lm-eval,browser]

It starts a server, runs the clients that are there one after the other, and says of each what
it saw, or what was not found. The exit status is 1 if something was wrong. lm-eval reads a
small task that is written here, not from a network; its log-likelihoods are compared with
those that kv.model computes from its own logits.
"""
import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KVLAB = os.path.join(ROOT, "kvlab")
PROMPT = "The capital of France is"
TOLERANCE = 2e-3  # of a log-likelihood of some tokens, in f32: batches round otherwise

FACTS = [
    ("The capital of France is", [" Paris.", " London.", " Madrid."]),
    ("The capital of Italy is", [" Berlin.", " Rome.", " Vienna."]),
    ("Water freezes at zero degrees", [" Celsius.", " kilograms.", " metres."]),
    ("The opposite of hot is", [" warm.", " cold.", " blue."]),
    ("The sun rises in the", [" west.", " east.", " night."]),
    ("A triangle has three", [" sides.", " wheels.", " colours of paint."]),
    ("In the beginning God created the heaven and the", [" earth.", " moon.", " law."]),
    ("Two plus two equals", [" five.", " four.", " nine."]),
    ("Honey is made by", [" bees.", " cows.", " spiders."]),
    ("The first month of the year is", [" March.", " January.", " August."]),
]

DIRECT = """
local kv = require "kvlab"
local json = require "kvlab.json"
local files = require "kvlab.files"
local set = kv.command_line.set
local m = kv.model(set.model, { dtype = "f32", engine = { blocks = 256 } })
local out = {}
for i, pair in ipairs(json.decode(files.read(set.pairs))) do
  local context = m.tokenizer:encode(pair[1], { special = true })
  local whole = m.tokenizer:encode(pair[1] .. pair[2], { special = true })
  local seq = m.engine:sequence()
  local logits = m.engine:prefill_all(seq, whole)
  local scores = logits:sub(logits:logsumexp(-1):reshape { #whole, 1 })
  local sum, is_greedy, best = 0, true, logits:argmax():list()
  for t = #context + 1, #whole do
    sum = sum + scores:narrow(t - 2, 1):narrow(whole[t], 1, 1):item()
    is_greedy = is_greedy and best[t - 1] == whole[t]
  end
  m.engine:finish(seq)
  out[i] = { sum, is_greedy }
end
local file = assert(io.open(set.answers, "w"))
file:write(json.encode(out))
file:close()
"""


class Server:
    """A server of its own, on a free port."""

    def __init__(self, program, model, *words):
        self.program = program
        words = [program, "serve", model, "--port=0", *words]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(words, stderr=self.log, cwd=ROOT)
        self.url = None
        while not self.url:
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(f"the server did not start: {self.log.read()}")
            time.sleep(0.1)
            self.log.seek(0)
            found = re.search(r"answers at (http://\S+)/v1", self.log.read())
            self.url = found and found.group(1)

    def resident(self):
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096

    def close(self):
        self.process.send_signal(2)
        self.process.wait(30)


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


class Wrong(Exception):
    pass


def expect(is_so, what):
    if not is_so:
        raise Wrong(what)


# ---- curl ----------------------------------------------------------------------------------


def curl(server, _):
    program = shutil.which("curl")
    if not program:
        return None

    def run(*words, data=None):
        words = [program, "-sS", "-m", "300", *words]
        return subprocess.run(words, input=data, capture_output=True).stdout

    yield run("--version").decode().split("\n")[0]
    text = run(server.url + "/v1/completions", "-d", json.dumps(
        {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}))
    yield f"a completion: {json.loads(text)['choices'][0]['text']!r}"
    text = run("-N", server.url + "/v1/completions", "-d", json.dumps(
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True})).decode()
    events = re.findall(r"data: (.*)\n\n", text)
    expect(events[-1] == "[DONE]", "a stream has no end")
    yield f"a stream of {len(events) - 1} chunks, and [DONE]"
    code = run("-o", "/dev/null", "-w", "%{http_code}", server.url + "/v1/completions", "-d",
               '{"prompt"').decode()
    expect(code == "400", f"half a JSON: status {code}")
    before, begin = server.resident(), time.monotonic()
    with tempfile.TemporaryFile() as file:  # a gigabyte of nothing
        file.truncate(1 << 30)
        answer = subprocess.run([program, "-sS", "-m", "300", "-w", " %{http_code} %{size_upload}",
                                 "-T", "-", "-X", "POST", "-H", "Content-Length: 1073741824",
                                 "-H", "Transfer-Encoding:", server.url + "/v1/completions"],
                                stdin=file, capture_output=True).stdout.decode()
    *_, code, sent = answer.split(" ")
    grown = server.resident() - before
    expect(code == "413" and "body_too_large" in answer and grown < 16 << 20,
           f"1 GB: {answer}, {grown} bytes more")
    yield (f"a body of 1 GB: 413 after {int(sent) / 1e6:.1f} MB and "
           f"{time.monotonic() - begin:.1f} s, {grown / 1e6:+.1f} MB resident")


# ---- the package openai --------------------------------------------------------------------


def openai_package(server, _):
    try:
        import openai
    except ImportError:
        return None
    yield f"openai {openai.__version__}"
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    yield f"models.list: {model}"
    one = client.completions.create(model=model, prompt=PROMPT, max_tokens=2, temperature=0,
                                    logprobs=2, echo=True)
    expect(one.choices[0].text.startswith(PROMPT), "echo")
    expect(one.choices[0].logprobs.token_logprobs[0] is None, "the first log-probability")
    yield f"completions.create: {one.choices[0].text!r}, usage {one.usage.total_tokens}"
    question = [{"role": "user", "content": "What is the capital of Italy?"}]
    whole = client.chat.completions.create(model=model, messages=question, max_tokens=24,
                                           temperature=0, logprobs=True, top_logprobs=2)
    expect(len(whole.choices[0].logprobs.content[0].top_logprobs) == 2, "top_logprobs")
    yield f"chat.completions.create: {whole.choices[0].message.content!r}"
    parts = client.chat.completions.create(model=model, messages=question, max_tokens=24,
                                           temperature=0, stream=True,
                                           stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in parts:
        usage = chunk.usage or usage
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    expect(text == whole.choices[0].message.content, f"streamed: {text!r}")
    expect(usage == whole.usage, f"usage: {usage}")
    yield f"the same streamed: equal, usage {usage.total_tokens}"
    drawn = [[c.text for c in client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=12, temperature=1, n=2,
        seed=3).choices] for _ in range(2)]
    expect(drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1], f"seeds: {drawn}")
    yield f"two answers with a seed, twice the same: {drawn[0]}"
    other = client.completions.create(model=model, prompt=PROMPT, max_tokens=2, temperature=0,
                                      extra_body={"policy": "streaming_blocks",
                                                  "policy_options": {"tokens": 64}})
    yield f"another policy by extra_body: {other.choices[0].text!r}"
    for kind, call in [
        (openai.NotFoundError, lambda: client.completions.create(model="gpt-4", prompt="a")),
        (openai.BadRequestError, lambda: client.completions.create(model=model, prompt="")),
        (openai.BadRequestError, lambda: client.completions.create(
            model=model, prompt="a", max_tokens=10 ** 6)),
        (openai.BadRequestError, lambda: client.chat.completions.create(
            model=model, messages=question, temperature=-1)),
    ]:
        try:
            call()
            raise Wrong(f"no {kind.__name__}")
        except kind as problem:
            yield f"{kind.__name__}: {problem.body['message']}"
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=400, stream=True,
                                       temperature=0, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while json.load(urllib.request.urlopen(server.url + "/health"))["running"] > 0:
        expect(time.monotonic() < deadline, "the answer of a client that left goes on")
        time.sleep(0.1)
    yield "a stream that was closed after its first chunk: the server stopped computing it"


# ---- lm-evaluation-harness -----------------------------------------------------------------

TASK = """task: facts
dataset_path: json
dataset_kwargs:
  data_files: {folder}/facts.jsonl
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
ANSWERS = {" Paris.", " Rome.", " Celsius.", " cold.", " east.", " sides.", " earth.", " four.",
           " bees.", " January."}


def lm_eval_harness(server, model):
    program = os.path.join(os.path.dirname(sys.executable), "lm_eval")
    if not os.path.exists(program):
        program = shutil.which("lm_eval")
    if not program:
        return None
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/facts.jsonl", "w") as file:
            for question, choices in FACTS:
                answer = next(i for i, c in enumerate(choices) if c in ANSWERS)
                file.write(json.dumps({"question": question, "choices": choices,
                                       "answer": answer}) + "\n")
        with open(f"{folder}/facts.yaml", "w") as file:
            file.write(TASK.format(folder=folder))
        name = json.load(urllib.request.urlopen(server.url + "/v1/models"))["data"][0]["id"]
        command = [program, "--model", "local-completions", "--model_args",
                    f"model={name},base_url={server.url}/v1/completions,num_concurrent=4,"
                    "tokenizer_backend=remote,max_length=8192",
                    "--tasks", "facts", "--include_path", folder, "--log_samples",
                    "--output_path", f"{folder}/out"]
        environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=f"{folder}/hf",
                           HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        table = [line for line in run.stdout.split("\n") if line.startswith("|")]
        expect(run.returncode == 0 and table, f"lm_eval: {run.stderr[-2000:]}")
        yield "lm_eval's own table:\n" + "\n".join(table)
        samples = [os.path.join(at, f) for at, _, fs in os.walk(f"{folder}/out") for f in fs
                   if f.startswith("samples_facts")]
        pairs, got = [], []
        with open(samples[0]) as file:
            for line in file:
                sample = json.loads(line)
                arguments = sample["arguments"]
                arguments = arguments.values() if isinstance(arguments, dict) else arguments
                for one, answer in zip(arguments, sample["resps"]):
                    one = list(one.values()) if isinstance(one, dict) else one
                    while len(answer) == 1:
                        answer = answer[0]
                    pairs.append(one[:2])
                    got.append((float(answer[0]), str(answer[1]) == "True"))
        with open(f"{folder}/pairs.json", "w") as file:
            json.dump(pairs, file)
        with open(f"{folder}/direct.lua", "w") as file:
            file.write(DIRECT)
        subprocess.run([server.program, "run", f"{folder}/direct.lua", "--set",
                        f"model={model}", "--set", f"pairs={folder}/pairs.json", "--set",
                        f"answers={folder}/answers.json"], check=True, cwd=ROOT)
        with open(f"{folder}/answers.json") as file:
            own = json.load(file)
        worst = max(abs(a[0] - b[0]) for a, b in zip(got, own))
        same = sum(a[1] == b[1] for a, b in zip(got, own))
        expect(len(got) == len(own) == 3 * len(FACTS) and same == len(own) and
               worst <= TOLERANCE and all(math.isfinite(a[0]) for a in got),
               f"{len(got)} log-likelihoods, {same} is_greedy equal, worst difference {worst}")
        yield (f"{len(got)} log-likelihoods against kv.model's own logits: largest difference "
               f"{worst:.1e}, is_greedy equal in all")


# ---- a browser -----------------------------------------------------------------------------


class Page:
    """A page in a headless Chromium, which is told what to do through a pair of pipes."""

    def __init__(self, program, url):
        self.folder = tempfile.TemporaryDirectory()
        own_in, its_out = os.pipe()
        its_in, own_out = os.pipe()

        def give_pipes():  # it reads from 3 and writes to 4
            spare = os.dup(its_out)
            os.dup2(its_in, 3)
            os.dup2(spare, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder.name}"], preexec_fn=give_pipes, close_fds=False,
            stderr=subprocess.DEVNULL)
        os.close(its_in), os.close(its_out)
        self.read, self.write = os.fdopen(own_in, "rb", 0), os.fdopen(own_out, "wb", 0)
        self.count, self.held, self.session = 0, b"", None
        target = self("Target.createTarget", url=url)["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.held:
                got = self.read.read(1 << 16)
                expect(got, "the browser ended")
                self.held += got
            one, self.held = self.held.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.count:
                expect("result" in answer, f"{method}: {answer}")
                return answer["result"]

    def value(self, expression):
        return self("Runtime.evaluate", expression=expression,
                    returnByValue=True)["result"].get("value")

    def close(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


STRIP = "[...document.querySelectorAll('#strip span')].map(s => [s.dataset.percent, s.textContent])"


def browser(server, _):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        return None
    yield subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    text = " ".join(question + choices[0] for question, choices in FACTS) * 2
    question = urllib.parse.quote(text + " What did I say about honey?")
    page = Page(program, f"{server.url}/?ask={question}")
    try:
        states, deadline = {}, time.monotonic() + 120
        while page.value("document.body.dataset.answers") != "1":
            strip = page.value(STRIP)
            states[str([percent for percent, _ in strip or []])] = True
            expect(time.monotonic() < deadline, "the page has no answer")
            time.sleep(0.02)
        strip = page.value(STRIP)
        problem = page.value("document.querySelector('.error')?.textContent")
        answer = page.value("document.querySelector('.assistant')?.textContent")
        picture = os.environ.get("KVLAB_SCREENSHOT")
        if picture:
            import base64
            with open(picture, "wb") as file:
                file.write(base64.b64decode(page("Page.captureScreenshot")["data"]))
    finally:
        page.close()
    expect(not problem and answer and len(strip) > 8, f"the page: {problem} {answer!r} {strip}")
    read = [int(percent) for percent, _ in strip]
    expect(len(states) > 3 and min(read) < 100 < sum(read), f"the strip: {states}")
    yield f"the page asked and showed {answer[:60]!r} …"
    yield (f"its strip of {len(strip)} blocks was seen in {len(states)} states; at the end: "
           + ", ".join(f"{p}% {t[:16]!r}" for p, t in strip[:4]) + ", …")


CLIENTS = {"curl": (curl, "Debian's curl"), "openai": (openai_package, "pip install openai"),
           "lm-eval": (lm_eval_harness, "pip install 'lm-eval[api]'"),
           "browser": (browser, "Debian's chromium")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", default="quest", help="of the server, with ratio 0.1")
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--kvlab", default=KVLAB, help="the program (./kvlab)")
    asked = parser.parse_args()
    status = 0
    server = Server(asked.kvlab, asked.model, "--dtype=f32", "--quiet", f"--policy={asked.policy}",
                    *(["--set=ratio=0.1"] if asked.policy != "full" else []))
    try:
        for name in asked.only.split(","):
            client, get = CLIENTS[name]
            seen = False
            try:
                for line in client(server, asked.model):
                    seen = True
                    print(f"{name:8} {line}", flush=True)
                if not seen:
                    print(f"{name:8} not found; {get}")
            except Wrong as problem:
                status = 1
                print(f"{name:8} WRONG: {problem}", flush=True)
    finally:
        server.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
