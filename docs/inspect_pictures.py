"""Make the pictures of inspecting.md anew: `python docs/inspect_pictures.py`. Needs the command chromium.

The report is that of the bundled model in bfloat16 on a CPU with one small compile range, from the cache.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parent / "images"
INSPECT = [
    *("inspect", "--device", "cpu", "--dtype", "bfloat16", "--compile-range", "8"),
    *("--run", "--quiet", "-o"),
]
WIDTH = 1280
# Picture -> section, height in pixels, colour scheme, and what is open: the beginnings of summaries, in order.
PICTURES: dict[str, tuple[str, int, str, list[str]]] = {
    "inspect_start_up": ("start-up", 960, "light", []),
    "inspect_model": (
        "model",
        820,
        "light",
        ["model", "model", "layers", "0", "self_attn", "o_proj", "mlp"],
    ),
    "inspect_passes": ("passes", 1000, "light", ["residual_rms_norm"]),
    "inspect_pieces": ("pieces", 1150, "dark", ["Piece B", "cpp_fused"]),
}
# Opens each summary once, the first that follows the one before it, and leaves nothing above the section.
SCRIPT = """
<style>*, *::before, *::after { transition: none !important }</style>
<script>
const section = document.getElementById(%s);
if (section.id !== "start-up") section.style.cssText = "margin-top: 0; padding-top: 0; border-top: 0";
section.querySelectorAll("details").forEach(details => { details.open = false; });
const summaries = [...section.querySelectorAll("summary")];
let from = 0;
for (const wanted of %s) {
  from += summaries.slice(from).findIndex(
    summary => summary.textContent.trim().split(/\\s+/).join(" ").startsWith(wanted));
  summaries[from++].parentElement.open = true;
}
for (let above = section.previousElementSibling; above && section.id !== "start-up"; ) {
  const next = above.previousElementSibling;
  above.remove();
  above = next;
}
</script>
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        for _ in range(2):  # the second time from the cache
            subprocess.run(["compiled-engine", *INSPECT, str(page)], check=True)
        for name, (section, height, scheme, opened) in PICTURES.items():
            copy = page.with_name(f"{name}.html")
            copy.write_text(page.read_text().replace("</body>", SCRIPT % (repr(section), repr(opened)) + "</body>"))
            picture = page.with_suffix(".png")
            command = [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--window-size={WIDTH},{height}", f"--user-data-dir={folder}/{name}"),
                f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
                *(f"--screenshot={picture}", copy.as_uri()),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            Image.open(picture).convert("RGB").quantize(256).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
