"""Print pip's requirement for the oldest or the newest torch of setup.py: python .ci/torch_range.py oldest|newest."""

import re
import sys
from pathlib import Path

text = (Path(__file__).parents[1] / "setup.py").read_text()
lowest, bound = re.search(r'"torch>=([\d.]+),<([\d.]+)"', text).groups()
print({"oldest": f"torch=={lowest}.*", "newest": f"torch>={lowest},<{bound}"}[sys.argv[1]])
