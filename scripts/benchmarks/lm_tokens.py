#!/usr/bin/env python3
"""Time to tokenise text: `trainer.lm.prepare` beside `tokenizers` alone on the same cores.

`lm_tokens.py TOKENIZER TEXT OUT [--rounds N]`, with the Python of a training environment. TOKENIZER is a
tokenizer.json, TEXT a text file, which is also converted to JSONL with a record per 4,000 characters. `tokenizers`
alone reads the records and calls `encode_batch` on 1,000 of them at a time, and `encode_batch_fast`, which leaves out
the offsets. Prints seconds of wall time and of all cores: on a busy machine compare the latter.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

RECORD = 4000
ALONE = """
import json, sys
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
encode = getattr(tokenizer, sys.argv[3])
total, batch = 0, []
def run():
    global total
    total += sum(len(each) for each in encode(batch, add_special_tokens=False))
    batch.clear()
for line in open(sys.argv[2], encoding="utf-8"):
    batch.append(json.loads(line)["text"])
    if len(batch) == 1000:
        run()
run()
print(total)
"""


def measure(argv: list[str]) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 2), "cpu": round(cpu, 2), "says": done.stdout.strip()[-90:]}


def write_records(text: Path, records: Path) -> None:
    with text.open(encoding="utf-8", newline="") as file, records.open("w", encoding="utf-8") as out:
        while piece := file.read(RECORD):
            out.write(json.dumps({"text": piece + file.readline()}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("tokenizer", "text", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    records = options.out / "text.jsonl"
    write_records(options.text, records)
    print(json.dumps({"bytes": records.stat().st_size, "cores": len(os.sched_getaffinity(0))}))
    ours = [sys.executable, "-m", "trainer.lm.prepare", "--vocabulary", str(options.tokenizer), "--out"]
    for round_number in range(options.rounds):
        for name in ("encode_batch", "encode_batch_fast"):
            argv = [sys.executable, "-c", ALONE, str(options.tokenizer), str(records), name]
            print(json.dumps({"round": round_number, "what": name, **measure(argv)}), flush=True)
        for path in (records, options.text):
            shutil.rmtree(options.out / "set", ignore_errors=True)
            found = measure([*ours, str(options.out / "set"), str(path)])
            print(json.dumps({"round": round_number, "what": f"prepare {path.suffix}", **found}), flush=True)


if __name__ == "__main__":
    main()
