"""Print pip's requirement for the oldest or the newest tested torch: python .ci/torch_range.py oldest|newest."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
lowest = re.search(r'"torch>=([\d.]+)"', (ROOT / "setup.py").read_text())[1]
tested = re.search(r'"torch": "([\d.]+)"', (ROOT / "ds_ext/engine/deepspeed_api/names.py").read_text())[1]
print({"oldest": f"torch=={lowest}.*", "newest": f"torch=={tested}"}[sys.argv[1]])
