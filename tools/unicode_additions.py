"""Writes lua/kvlab/text/unicode_additions.lua: the characters that Unicode has had since
version 14, by the classes that expressions of tokenizer files name. The classes are those
of the package `tokenizers` (Oniguruma); what version 14 had is Python 3.11's unicodedata.

  python3.11 tools/unicode_additions.py > lua/kvlab/text/unicode_additions.lua
"""
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

CLASSES = ["L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No",
           "P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So",
           "Z", "Zs", "Zl", "Zp", "Han", "Hiragana", "Katakana"]
LATIN1_WORDS = {0xB2, 0xB3, 0xB9, 0xBC, 0xBD, 0xBE}  # \w of Oniguruma has them

assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
NEW = [c for c in range(0x110000)
       if unicodedata.category(chr(c)) == "Cn" and not 0xD800 <= c <= 0xDFFF]


def members(expression, candidates):
    split, found = pre_tokenizers.Split(Regex(expression), "removed"), set()
    for i in range(0, len(candidates), 4096):
        part = candidates[i:i + 4096]
        kept = {ord(c) for piece, _ in split.pre_tokenize_str("".join(map(chr, part)))
                for c in piece}
        found |= set(part) - kept
    return found


def unnormalized():
    """Characters that the normal forms of `tokenizers` leave as they are, because they
    are newer than its tables: what it makes of a character, alone or beside other marks,
    is not what Unicode 14 says."""
    forms = [(f, getattr(normalizers, f)()) for f in ("NFC", "NFD", "NFKC", "NFKD")]
    found = set()
    for c in range(0x110000):
        if 0xD800 <= c <= 0xDFFF:
            continue
        texts = [chr(c)]
        if unicodedata.combining(chr(c)):
            for mark in "\u0334\u0345\u0301\u0323\u302a":
                texts += ["a" + chr(c) + mark, "a" + mark + chr(c)]
        if any(form.normalize_str(t) != unicodedata.normalize(name, t)
               for t in texts for name, form in forms):
            found.add(c)
    return found


def ranges(codes):
    pairs = []
    for c in sorted(codes):
        if pairs and pairs[-1][1] == c - 1:
            pairs[-1][1] = c
        else:
            pairs.append([c, c])
    return ["\\x{%X}" % a if a == b else "\\x{%X}-\\x{%X}" % (a, b) for a, b in pairs]


def entry(name, codes):
    lines, line = [], ""
    for item in ranges(codes):
        if len(line) + len(item) > 78:
            lines.append(line)
            line = ""
        line += item
    if line or not lines:
        lines.append(line)
    if len(lines) == 1 and len(name) + len(lines[0]) < 78:
        print(f"  {name} = [[{lines[0]}]],")
    else:
        print(f"  {name} = [[" + "]]\n    .. [[".join([""] + lines) + "]],")


print("""--- Characters that Unicode has had since version 14, as items of a class [...] of PCRE2,
-- for versions of PCRE2 that do not know them. tools/unicode_additions.py writes this.
return {""")
for name in CLASSES:
    entry(name, members(r"\p{%s}" % name, NEW))
entry("unnormalized", unnormalized())
entry("word", members(r"\w", NEW) | LATIN1_WORDS)
print("}")
