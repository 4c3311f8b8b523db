"""How the programs of the model server end when something is wrong: what the log says, and the exit code."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from tgi.errors import TgiError

log = logging.getLogger(__name__)

FAILED = 1


def tell(error: Exception) -> int:
    """One line for what somebody can mend, a traceback for what nobody expected. -> exit code"""
    if isinstance(error, TgiError):
        log.error("Error: %s", error)
    else:
        log.exception("Error: the model server failed: %s", error, exc_info=error)
    return FAILED


def leave_at_once(code: int) -> NoReturn:
    """End without goodbye: what an orderly end would do may wait for somebody who never comes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
