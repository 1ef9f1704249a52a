"""torchrun, silent about ranks that fail: `python -m pipeline.runtime.torchrun ARGUMENTS`.

What went wrong is in the files that ranks write, and `launch` says it; torchrun's own report only says that
something did.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: list[str]) -> int:
    """Run torchrun; 0 when all ranks ended well."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
