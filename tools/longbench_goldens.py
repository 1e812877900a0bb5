#!/usr/bin/env python3
"""Score pairs of texts as LongBench does, for spec/lua/task/longbench_spec.lua.

    python3 tools/longbench_goldens.py --metrics LongBench/metrics.py --out spec/data/tasks/longbench.json

needs the packages rouge and fuzzywuzzy, without python-Levenshtein, as LongBench's requirements say;
jieba is not used. Writes [{"given", "answers", "classes", and by score its number}].
"""
import argparse, json, random, sys, types

WORDS = ("a an the The cat cats sat on mat, mat. (mat) Paragraph 3 13 30 3,000 7 x = y + 1; return foo(bar) # // ` "
         "DESC ENTY NUM école naïve 東京 U.S. end. Really? . .. \\n").split(" ")
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\u3000", ""]
CLASSES = ["Date", "Number", "Number of something", "Other number", "Other", "Something", "Date of birth", "of"]
CODE = [("    return x + 1\n", ["    return x + 2"]), ("# a comment\n\nx = 1", [""]), ("// no\n`no`\n", ["y"]),
        ("", [""]), ("\n\nself.value = value  ", ["self.values = values"]), ("x" * 250 + "yz", ["x" * 240 + "zy"]),
        ("abcde fghij " * 30, ["fghij abcdf " * 28, "q"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    sys.modules["jieba"] = types.ModuleType("jieba")
    metrics = types.ModuleType("metrics")
    exec(compile(open(args.metrics).read(), args.metrics, "exec"), metrics.__dict__)
    draw = random.Random(1)

    def text(n):
        return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(n)))

    rows = [{"given": given, "answers": answers} for given, answers in CODE]
    rows += [{"given": text(20), "answers": [text(20) for _ in range(draw.randrange(1, 4))]} for _ in range(60)]
    rows += [{"given": text(400), "answers": [text(300)]} for _ in range(4)]
    for row in rows:
        row["given"] += " ".join(draw.sample(CLASSES, draw.randrange(4)))
    kinds = {"f1": metrics.qa_f1_score, "rouge": metrics.rouge_score, "count": metrics.count_score,
             "code": metrics.code_sim_score, "classes": metrics.classification_score,
             "retrieval": metrics.retrieval_score, "retrieval_zh": metrics.retrieval_zh_score}
    for i, row in enumerate(rows):
        row["all_classes"] = draw.sample(CLASSES, draw.randrange(1, len(CLASSES) + 1))
        row["scores"] = {}
        for name, score in kinds.items():
            answers = {"count": ["3", "13"], "classes": [draw.choice(row["all_classes"])], "retrieval": ["Paragraph 3"],
                       "retrieval_zh": ["\u6bb5\u843d13"]}.get(name, row["answers"])
            best = max([0.0] + [score(row["given"], a, all_classes=row["all_classes"]) for a in answers])
            row["scores"][name] = {"answers": answers, "score": best}
        del row["answers"]
    with open(args.out, "w") as file:
        file.write("[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n")


if __name__ == "__main__":
    main()
