"""``python -m trainer.ds_config --stage 2 -o ds_config.json``, for machines without clusterctl."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

from trainer.ds_config import PRESETS, ConfigError, make, notices, text
from trainer.ds_config.request import OPTIONS, request_of


def main(argv: Optional[List[str]] = None) -> int:
    """Print the configuration, or write it to a file. Return 2 for options that contradict each other."""
    parser = argparse.ArgumentParser(prog="python -m trainer.ds_config", description="Write DeepSpeed's configuration.")
    parser.add_argument("--like", choices=list(PRESETS), help="Start from a named configuration.")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="Output file; stdout by default.")
    for each in OPTIONS:
        if each.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(each.flag, dest=each.field, action=action, default=None, help=each.help)
        elif each.choices:
            values = [each.type(one) for one in each.choices]
            parser.add_argument(each.flag, dest=each.field, type=each.type, choices=values, help=each.help)
        else:
            parser.add_argument(each.flag, dest=each.field, type=each.type, metavar=each.metavar, help=each.ranged_help)
    options = vars(parser.parse_args(argv))
    try:
        request = request_of(options, options["like"])
        content = text(make(request))
        if options["output"] is None:
            sys.stdout.write(content)
        else:
            options["output"].write_text(content, encoding="utf-8")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n" + (f"try: {error.hint}\n" if error.hint else ""))
        return 2
    except OSError as error:
        sys.stderr.write(f"error: cannot write {error.filename}: {error.strerror}\n")
        return 2
    sys.stderr.writelines(f"{each}\n" for each in notices(request))
    return 0


if __name__ == "__main__":
    sys.exit(main())
