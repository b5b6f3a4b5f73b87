"""Draw the picture of docs/report.md from a report, in a folder whose path may appear in it:

    python -m ds_ext report . -o report.html
    python docs/images/report.py report.html docs/images/report.png

The picture leaves out all charts but the first two, some tables, and what is folded.
"""

import base64
import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WIDTH = 1200
LEFT_OUT = """
for (const id of ["memory", "checkpoints", "starts", "notes"])
  document.getElementById(id)?.closest("section").remove();
document.querySelectorAll("figure").forEach((chart, at) => { if (chart.closest(".charts") && at > 1) chart.remove(); });
document.querySelectorAll("details, footer").forEach(folded => folded.remove());
return document.body.getBoundingClientRect().bottom;
"""


def main() -> None:
    """Write the picture of a page; both paths are on the command line."""
    page, picture = map(Path, sys.argv[1:])
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as profile:
        for flag in ("headless", "no-sandbox", f"user-data-dir={profile}", f"window-size={WIDTH},900"):
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            driver.get(page.resolve().as_uri())
            driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": driver.execute_script(LEFT_OUT), "scale": 1}
            asked = {"captureBeyondViewport": True, "clip": clip}
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", asked)
        finally:
            driver.quit()
    picture.write_bytes(base64.b64decode(shot["data"]))


main()
