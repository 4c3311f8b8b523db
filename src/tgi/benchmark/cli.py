"""`text-generation-benchmark`: holds the name of TGI's tool, which does not exist here yet, and says so."""

from __future__ import annotations

import sys


def main() -> int:
    """Always 1: a script that expects figures must not take silence for success."""
    print(
        "Error: text-generation-benchmark does not exist yet in this version. Measure a running server over HTTP",
        file=sys.stderr,
    )
    return 1
