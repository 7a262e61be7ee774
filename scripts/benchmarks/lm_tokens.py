#!/usr/bin/env python3
"""Time to tokenise text: `trainer.lm.prepare` beside `tokenizers` alone on the same cores.

`lm_tokens.py [--tokenizer FILE] [--text FILE] [--megabytes 1024] [--rounds N]`, with the Python of a training
environment. By default the text is Python sources and documentation of this machine, again from the start until it is
large enough, and the tokenizer a BPE of 32,000 tokens. The text is converted to JSONL with a record per 4,000
characters. `tokenizers` alone reads the records and calls `encode_batch_fast` on 1,000 of them at a time, which
leaves out the offsets of `encode_batch`. Prints seconds of wall time and of all cores, and the ratio: on a busy
machine compare the latter.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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


def write_text(path: Path, megabytes: int) -> None:
    """Write texts of this machine."""
    folders = (Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["stdlib"]), Path("/usr/share/doc"))
    kinds = {".py", ".md", ".rst", ".txt", ".html"}
    found = [
        each for folder in folders for each in sorted(folder.rglob("*")) if each.suffix in kinds and each.is_file()
    ]
    with path.open("wb") as file:
        while file.tell() < megabytes << 20:
            for each in found:
                file.write(each.read_bytes().decode("utf-8", "replace").encode())
                if file.tell() >= megabytes << 20:
                    break


def train(path: Path, folder: Path) -> Path:
    """Train a BPE on the first megabytes of a text."""
    part = folder / "part.txt"
    with path.open("rb") as file:
        part.write_bytes(file.read(32 << 20))
    program = ["-m", "trainer.lm.prepare", str(part), "--out", str(folder / "bpe"), "--tokens", "bpe"]
    subprocess.run([sys.executable, *program, "--vocab-size", "32000"], check=True, stderr=subprocess.DEVNULL)
    return folder / "bpe/tokenizer.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="tokens-", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        out = Path(name)
        text, records = options.text or out / "text.txt", out / "text.jsonl"
        if not options.text:
            write_text(text, options.megabytes)
        tokenizer = options.tokenizer or train(text, out)
        write_records(text, records)
        print(json.dumps({"way": "text", "bytes": records.stat().st_size, "cores": len(os.sched_getaffinity(0))}))
        ours = [sys.executable, "-m", "trainer.lm.prepare", "--vocabulary", str(tokenizer), "--out"]
        for number in range(options.rounds):
            argv = [sys.executable, "-c", ALONE, str(tokenizer), str(records), "encode_batch_fast"]
            alone = measure(argv)
            print(json.dumps({"round": number, "way": "tokenizers", **alone}), flush=True)
            shutil.rmtree(out / "set", ignore_errors=True)
            found = measure([*ours, str(out / "set"), str(records)])
            print(json.dumps({"round": number, "way": "prepare", **found}), flush=True)
            print(json.dumps({"way": "ratio", "ratio": round(found["wall"] / alone["wall"], 3)}), flush=True)


if __name__ == "__main__":
    main()
