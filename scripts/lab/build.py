#!/usr/bin/env python3
"""Prints the path of the rehearsal environment, building it when it is not in the cache.

A real conda environment with torch (CPU), DeepSpeed and an editable LLaMA-Factory, made without any conda channel: the
`python` package is made from an interpreter that is installed here, and its pip does the rest. Needs py-rattler,
zstandard and pip in the Python that runs this (`pip install -e '.[dev]'` brings them) and pip's usual index.
`--variant cuda` is the same with a CUDA build of torch, 5.9 GB instead of 2.2, for benchmarks.
"""

import argparse
import json
import sys
from pathlib import Path

import cuda_env
import lab_env
from lab_run import LabError


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cache", type=Path, help="default: $CLUSTERCTL_CACHE, /var/cache/clusterctl or ~/.cache/clusterctl"
    )
    parser.add_argument(
        "--python", type=Path, help="the interpreter to copy, >= 3.11 (default: the one that runs this)"
    )
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu", help="the build of torch (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print what was built, its versions and seconds")
    arguments = parser.parse_args()
    try:
        builder = {"cpu": lab_env, "cuda": cuda_env}[arguments.variant]
        report = builder.build_env(arguments.cache, arguments.python)
    except LabError as error:
        print(f"scripts/lab/build.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1, sort_keys=True) if arguments.json else report["prefix"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
