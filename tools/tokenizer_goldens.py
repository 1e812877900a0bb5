"""Writes goldens of the package `tokenizers` for spec/lua/text/goldens_spec.lua: small
tokenizers that it trains, texts in many scripts, and what it encodes and decodes them to.

  pip install tokenizers==0.23.3 sentencepiece==0.2.3 gguf==0.19.0 \
    transformers==5.23.0 jinja2 protobuf
  python3 tools/tokenizer_goldens.py spec/data/tokenizers KJV           the committed ones
  python3 tools/tokenizer_goldens.py /tmp/large KJV --bytes=1000000     1 MB of text
  KVLAB_TOKENIZER_GOLDENS=/tmp/large ./kvlab test spec/lua/text/goldens_spec.lua

KJV is an English text; the committed goldens have that of `bible -f gen1:1-rev22:21` from
the Debian package bible-kjv. Ids are stored as their number and their CRC-32.
"""
import argparse
import copy
import json
import os
import random
import struct
import unicodedata
import zlib

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def capitals(last, digits):
    """Mistral's Tekken, and OpenAI's o200k with contractions."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (f"{before}{UPPER}*{LOWER}+{last}|{before}{UPPER}+{LOWER}*{last}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


DEEPSEEK3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
             r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
             r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u180e\u2000\u2003\u200b\u2028\u2029\u202f\u205f\u3000"
EMOJI = ["👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️‍🔥", "1️⃣", "🧑‍🚀", "😀"]
WORDS = ("it's don't WE'LL I'm you'd they've he's 'Tis O'Neill ſ's 'ſ K’s naïve café "
         "Straße İstanbul ﬁne Å Å e\u0301 ﷺ 한국어 각 क्षि สวัสดี مرحبا שלום Привет "
         "γειά 日本語 中文字符 ひらがな カタカナ ½ Ⅷ ٣٤٥ ४५६ 一二三 12345678 3.14 1,000 "
         "$5 x_y <|im_start|> <|im_end|> <s> </s> <extra> foo_bar http://a.b/?c=d&e").split()
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


# ---- texts ---------------------------------------------------------------------------

def assigned():
    """Assigned characters by their first 256: so every block has its turn."""
    pages = {}
    for c in range(0x20, 0x110000):
        if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co"):
            pages.setdefault(c >> 8, []).append(chr(c))
    return list(pages.values())


def any_character(rng):
    while True:
        c = rng.randrange(0x110000)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def make_texts(rng, english, size):
    pages = assigned()
    few = [p for p in pages if ord(p[0]) < 0x3000]

    def page_text(n):
        page = rng.choice(few if rng.random() < 0.6 else pages)
        return "".join(rng.choice(page) if rng.random() < 0.85 else rng.choice(" \n0a.")
                       for _ in range(n))

    def english_text(n):
        at = rng.randrange(max(1, len(english) - n))
        return english[at:at + n]

    kinds = [
        english_text, page_text,
        lambda n: "".join(rng.choice(WORDS) + rng.choice([" ", " ", "  ", "\n", ""])
                          for _ in range(n // 6)),
        lambda n: "".join(rng.choice(SPACES) if rng.random() < 0.5 else rng.choice("ab1.é中")
                          for _ in range(n)),
        lambda n: "".join(rng.choice(EMOJI) + rng.choice(["", " ", "a", "\u0301"])
                          for _ in range(n // 6)),
        lambda n: "".join(rng.choice("aeiouकनพमй한") + rng.choice(
            ["", "\u0301", "\u0323\u0307", "\u0300", "\u093c", "\u3099", "\u0e31"])
            for _ in range(n // 2)),
        lambda n: "".join(any_character(rng) for _ in range(n)),
        lambda n: rng.choice("a1 .\n中") * n,
        lambda n: "".join(rng.choice("0123456789٣४Ⅷ½²,. ") for _ in range(n)),
        lambda n: bytes(rng.randrange(256) for _ in range(n)),
        lambda n: english_text(n).encode()[:-1] + bytes([rng.randrange(128, 256)]) + b" a",
    ]
    texts, total, i = ["", " ", "  ", "a", " a", "\n", "▁", "▁a", " ▁ a", "\0", "<s>", "a<s>",
                       "<s> a", "<s>▁a", "é", "e\u0301", "\ufeffa"], 0, 0
    while total < size:
        text = kinds[i % len(kinds)](rng.choice([3, 20, 100, 400]))
        texts.append(text)
        total += len(text if isinstance(text, bytes) else text.encode())
        i += 1
    return texts


# ---- tokenizers ----------------------------------------------------------------------

def train(corpus, pre, size, alphabet):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, limit_alphabet=len(alphabet) + 60,
        show_progress=False))
    return json.loads(tokenizer.to_str())["model"]


def added(content, i, special=True, normalized=False, **more):
    token = dict(id=i, content=content, single_word=False, lstrip=False, rstrip=False,
                 normalized=normalized, special=special)
    token.update(more)
    return token


def numbered(model, first):
    """A model with `first` in front of its vocabulary."""
    tokens = first + [t for t in sorted(model["vocab"], key=model["vocab"].get)
                      if t not in first]
    return dict(model, vocab={t: i for i, t in enumerate(tokens)})


def byte_level(model, pre, **more):
    model = numbered(model, [])
    n = len(model["vocab"])
    tokens = [added(t, n + i) for i, t in enumerate(SPECIALS)]
    tokens.append(added("<extra>", n + len(SPECIALS), False, True))
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": False}
    steps = [dict(last, use_regex=True) if p == "GPT2" else p for p in pre]
    if "GPT2" not in pre:
        steps.append(last)
    return dict({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens,
        "normalizer": None, "post_processor": last, "decoder": last, "model": model,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}, **more)


def split(expression):
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
            "invert": False}


def bos(i, token="<s>"):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}}}


def sentence_piece(model, normalizer, pre, strips=True):
    first = SPECIALS + ["<0x%02X>" % b for b in range(256)]
    model = dict(numbered(model, first), unk_token="<unk>", fuse_unk=True,
                 byte_fallback=True)
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [added(t, i) for i, t in enumerate(SPECIALS)],
            "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": bos(1),
            "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}


def make_files(corpus):
    letters = pre_tokenizers.ByteLevel.alphabet()

    def level(expression, digits=False):
        steps = [pre_tokenizers.Digits(True)] if digits else []
        steps += [pre_tokenizers.Split(Regex(expression), "isolated"),
                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        return train(corpus, pre_tokenizers.Sequence(steps), 700, letters)

    meta = train(corpus, pre_tokenizers.Metaspace(), 500, ["▁"])
    across = train(corpus[:60], pre_tokenizers.Split("\n", "removed"), 300, ["▁"])
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    legacy = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    llama3 = level(LLAMA3)
    n = len(llama3["vocab"])
    return {
        "gpt2": byte_level(level(GPT2), ["GPT2"]),
        "llama3": byte_level(dict(llama3, ignore_merges=True), [split(LLAMA3)],
                             post_processor=bos(n + 1)),
        "qwen2": byte_level(level(QWEN2), [split(QWEN2)], normalizer={"type": "NFC"}),
        "smollm": byte_level(level(GPT2, True),
                             [{"type": "Digits", "individual_digits": True}, "GPT2"]),
        "llama2": sentence_piece(meta, legacy, None),
        "across": sentence_piece(across, legacy, None),
    }


def patches(files):
    """Cases: a name, the file that it is made from, and the fields that are different."""
    def pre(*steps):
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}

    def meta(scheme, splits):
        return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
                "split": splits}

    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": False}
    cases = [(name, name, {}) for name in files]
    cases += [
        ("tekken", "llama3", pre(split(capitals("", r"\p{N}")), last)),
        ("gpt-4o", "gpt2", pre(split(capitals("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                                              r"\p{N}{1,3}")), last)),
        ("deepseek-v3", "gpt2", pre(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"),
                                    split(DEEPSEEK3), last)),
        ("mistral", "llama2", {"normalizer": None, "pre_tokenizer": meta("first", False)}),
        ("gemma", "llama2", {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                              "behavior": "MergedWithPrevious", "invert": False},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]}}),
        ("metaspace", "llama2", {"normalizer": None, "pre_tokenizer": meta("always", True),
                                 "decoder": meta("always", True)}),
        ("metaspace-never", "llama2", {"normalizer": None,
                                       "pre_tokenizer": meta("never", True),
                                       "decoder": meta("never", True)}),
        ("prefix", "gpt2", {"pre_tokenizer": dict(last, add_prefix_space=True,
                                                  use_regex=True)}),
        ("words", "gpt2", pre({"type": "WhitespaceSplit"}, split(r"\w+"), last)),
        ("digits", "gpt2", pre({"type": "Digits", "individual_digits": False}, last)),
        ("delimiter", "gpt2", pre({"type": "CharDelimiterSplit", "delimiter": "a"}, last)),
    ]
    for form in "NFC", "NFD", "NFKC", "NFKD":
        cases.append((form, "gpt2", {"normalizer": {"type": form}}))
    cases.append(("normalizers", "gpt2", {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": "%1"},
        {"type": "Replace", "pattern": {"String": "."}, "content": "%"}]}}))
    for behavior in ("Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                     "MergedWithNext"):
        for invert in False, True:
            rule = {"type": "Split", "pattern": {"Regex": r"\p{P}|\s|e+"},
                    "behavior": behavior, "invert": invert}
            cases.append((f"{behavior} {invert}", "gpt2", pre(rule, last)))
    rule = {"type": "Split", "pattern": {"Regex": r"\p{P}|\s|e*"}, "invert": False,
            "behavior": "MergedWithPrevious"}
    cases.append(("empty matches", "gpt2", pre(rule, last)))
    for fuse in False, True:
        cases.append((f"unk fuse={fuse}", "llama2", {"model": {
            "byte_fallback": False, "fuse_unk": fuse}}))
    n = len(files["gpt2"]["model"]["vocab"])
    strips = [added("<s>", n + 1, lstrip=True), added("</s>", n + 2, rstrip=True),
              added("the", n + 6, False, single_word=True),
              added("x_", n + 7, False, True), added("x_y", n + 8, False, True)]
    tokens = [t for t in files["gpt2"]["added_tokens"] if t["content"] not in ("<s>", "</s>")]
    cases.append(("added", "gpt2", {"added_tokens": sorted(tokens + strips,
                                                           key=lambda t: t["id"])}))
    return cases


def patched(file, patch):
    file = copy.deepcopy(file)
    for key, value in patch.items():
        if key == "model":
            file["model"].update(value)
        else:
            file[key] = value
    return file


# ---- results -------------------------------------------------------------------------

def crc(ids):
    return [len(ids), zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))]


def results(tokenizer, texts):
    rows = []
    for text in texts:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text).ids
        tokenizer.encode_special_tokens = False
        special = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(special).encode()
        rows.append(crc(plain) + crc(special) + [zlib.crc32(decoded)])
    return rows


# ---- SentencePiece and GGUF ----------------------------------------------------------

def sentence_piece_golden(corpus, texts):
    """A model of the package `sentencepiece` as GGUF metadata, and its ids."""
    import io

    import sentencepiece
    import sentencepiece.sentencepiece_model_pb2 as pb2
    model = io.BytesIO()
    lines = [line for text in corpus for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe",
        vocab_size=900, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2,
        num_threads=1, split_digits=True)
    proto = pb2.ModelProto.FromString(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # ▁ in a text is the same as a space; white space of other kinds stays.
    rows = [crc(processor.encode(t.decode("utf-8", "replace") if isinstance(t, bytes) else t))
            for t in texts]
    return {"tokens": [p.piece for p in proto.pieces],
            "scores": [p.score for p in proto.pieces],
            "token_type": [p.type for p in proto.pieces], "rows": rows}


def gguf_golden(path, texts):
    """What the tokenizer of SmolLM2, read from its GGUF file, makes of the texts."""
    import gguf

    fields = gguf.GGUFReader(path).fields

    def strings(name):
        field = fields["tokenizer.ggml." + name]
        return [bytes(field.parts[i]).decode() for i in field.data]

    kinds = fields["tokenizer.ggml.token_type"]
    kinds = [int(kinds.parts[i][0]) for i in kinds.data]
    tokens = strings("tokens")
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": True}
    file = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [added(t, i) for i, t in enumerate(tokens) if kinds[i] == 3],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True}, last]},
            "post_processor": None, "decoder": last,
            "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)},
                      "merges": strings("merges")}}
    return {"rows": results(Tokenizer.from_str(json.dumps(file)), texts)}


# ---- chats ---------------------------------------------------------------------------

CHATS = [
    "u:Hello", "s:You are a cat.|u:Hello", "u:2+2?|a:4|u: And\u00a0é? \n",
    "s: x |u:\n\n1|a: <think>\nwhy\n</think>\n\nthis |u:<s>日本|a:b</s>|u:'\"{{ 1 }}",
    "u:a|a:b", "a:b|u:c", "u:a|u:b", "u:|a:|u:", "s:only",
]


def chat_goldens(template):
    """Texts that transformers' apply_chat_template writes by the template of SmolLM2;
    tools/template_goldens.py compares other templates."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    roles, rows = {"s": "system", "u": "user", "a": "assistant"}, []
    for chat in CHATS:
        messages = [{"role": roles[m[0]], "content": m[2:]} for m in chat.split("|")]
        for is_prompt in False, True:
            text = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False,
                add_generation_prompt=is_prompt)
            rows.append({"messages": messages, "prompt": is_prompt, "text": text})
    return {"rows": rows}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("english")
    parser.add_argument("--bytes", type=int, default=12000)
    parser.add_argument("--gguf", help="the GGUF file of SmolLM2-135M-Instruct")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    english, rng = open(options.english).read(), random.Random(1)
    corpus = [english[i:i + 2000] for i in range(0, 200000, 2000)]
    corpus += [t for t in make_texts(rng, english, 60000) if isinstance(t, str)]
    files = make_files(corpus)
    texts = make_texts(random.Random(2), english, options.bytes)

    def write(name, value):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        with open(os.path.join(options.out, name + ".json"), "w") as file:
            file.write(text + "\n")

    for name, file in files.items():
        write(name, file)
    cases = []
    for name, base, patch in patches(files):
        tokenizer = Tokenizer.from_str(json.dumps(patched(files[base], patch)))
        cases.append({"name": name, "file": base, "patch": patch,
                      "rows": results(tokenizer, texts)})
    write("sentencepiece", sentence_piece_golden(corpus, texts))
    if options.gguf:
        import gguf
        field = gguf.GGUFReader(options.gguf).fields["tokenizer.chat_template"]
        template = bytes(field.parts[field.data[0]]).decode()
        write("smollm2", gguf_golden(options.gguf, texts))
        write("chats", chat_goldens(template))
    write("goldens", {"texts": [{"hex": t.hex()} if isinstance(t, bytes) else t
                                for t in texts], "cases": cases})


main()
