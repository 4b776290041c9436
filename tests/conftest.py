"""Makes `tests/real.py` importable as `real` under importlib mode, and gives each worker a core of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# There is a worker on each core already: more threads of OpenBLAS only wait for each other, at full load. Read when
# NumPy is imported, here and in the commands that tests run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
