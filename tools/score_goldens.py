#!/usr/bin/env python3
"""Score pairs of texts with the packages that define the scores.

    python3 tools/score_goldens.py --squad squad_metrics.py --out spec/data/tasks/scores.json

needs rouge-score, and transformers/data/metrics/squad_metrics.py of transformers 4, which holds
SQuAD's own evaluation. Writes [{"given": …, "answers": […], "exact": …, "f1": …, "rouge_l": …}].
"""
import argparse, json, random, sys, types
from rouge_score import rouge_scorer

WORDS = ("a an the The AN cat cats sat on mat, mat. (mat) Ärger ärger ΣΑΣ É école naïve don't state-of-the-art 42 "
         "42.0 3,000 “the” —a— a- x_the_y U.S. 東京 ß İstanbul… the- K2 … ! ? re-run e.g. 's").split()
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c"]
PAIRS = [("The Nile.", ["nile"]), ("", ["x"]), ("the", ["a", "x"]), ("", [""]), ("...", ["!"]), ("a b c d", ["b d a c"]),
         ("police killed the gunman", ["police kill the gunman", "the gunman police killed"]),
         ("In 1912, the ship sank", ["1912"]), ("Paris", ["London", "paris!"]), ("x x y", ["x y y", "x x x x"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--squad", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    stub = types.ModuleType("transformers.utils")   # the file asks it for a logger and nothing else
    stub.logging = types.SimpleNamespace(get_logger=lambda name: None)
    sys.modules["transformers"], sys.modules["transformers.utils"] = types.ModuleType("transformers"), stub
    source = open(args.squad).read().replace("from ...utils", "from transformers.utils").replace(
        "from ...models.bert import BasicTokenizer", "BasicTokenizer = None")
    squad = types.ModuleType("squad")
    exec(compile(source, args.squad, "exec"), squad.__dict__)
    rouge = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    draw = random.Random(1)

    def text(n):
        return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(draw.randrange(n)))

    pairs = PAIRS + [(text(8), [text(8) for _ in range(draw.randrange(1, 4))]) for _ in range(60)]
    rows = []
    for given, answers in pairs:
        rows.append({"given": given, "answers": answers,
                     "exact": max(squad.compute_exact(a, given) for a in answers),
                     "f1": max(squad.compute_f1(a, given) for a in answers),
                     "rouge_l": max(rouge.score(a, given)["rougeL"].fmeasure for a in answers)})
    with open(args.out, "w") as file:
        file.write("[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n")


main()
