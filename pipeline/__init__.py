"""The command line: settings, plan, resume, publishing and reports."""

import os
from pathlib import Path

if Path("/sys/kernel/mm/transparent_hugepage").exists():
    # torch then asks Linux for pages of 2 MiB: results of an FFN, fetched in small ones, take twice as long to write.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
