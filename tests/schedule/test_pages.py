"""Web pages: their embedded data and structure, and, where there is a browser, that they work."""

import json
import re
import shutil
import subprocess

import pytest

from dualpipe_jax.schedule import Costs, build, compare, parse_cell, simulate
from dualpipe_jax.schedule.export import comparison_page, schedule_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Turns to another coupling, zooms in, plays, and points at rank 0's first cell; then says what came of it.
USER = """<script>
addEventListener("load", () => {
  const box = $("chart").getBoundingClientRect(), at = { clientX: box.left + 62, clientY: box.top + 30 };
  $("mode").value = "neighbour"; $("mode").onchange();
  $("chart").dispatchEvent(new PointerEvent("pointermove", at));
  document.body.dataset.tip = $("tip").textContent;
  $("in").click();
  document.body.dataset.shown = to - from;
  $("play").click();
  setTimeout(() => { document.body.dataset.clock = now; }, 1000);
});
</script></html>"""


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def dump(page, folder):
    """The page's elements after its scripts have run."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command = [BROWSER, *flags, f"--user-data-dir={folder}", "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_page_has_every_cell_and_mode():
    simulation = simulate(build("dualpipe", num_ranks=4, num_microbatches=8), Costs(pair=2.5), "neighbour")
    data = data_of(schedule_page(simulation))
    assert [[parse_cell(text) for text, *_ in row] for row in data["cells"]] == list(
        map(list, simulation.schedule.ranks)
    )
    assert data["mode"] == "neighbour"
    assert data["modes"]["neighbour"]["start"] == list(map(list, simulation.start))
    assert data["modes"]["neighbour"]["makespan"] == simulation.makespan
    assert set(data["modes"]) == {"async", "neighbour", "neighbour_1", "lockstep"}
    first = data["cells"][0][0]
    assert first == ["0F0", 1.0, [["F", 0, 0, 0]]]
    assert all(f"{kind}{shade}" in data["colours"] for row in data["cells"] for c in row for kind, shade, *_ in c[2])
    assert all(0 <= steady <= cooldown for steady, cooldown in data["modes"]["async"]["phases"])


@pytest.mark.parametrize("kind", ["schedule", "comparison"])
def test_pages_are_self_contained(kind):
    simulation = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    page = schedule_page(simulation) if kind == "schedule" else comparison_page(compare(2, [4]), 2, "</script>")
    assert not re.findall(r"https?:|src=|href=|@import|url\(", page)
    assert page.count("</script>") == 2  # no text of the data ends the script
    assert page.rstrip().endswith("</html>")
    used = set(re.findall(r'\$\("(\w+)"\)', page))
    assert used <= set(re.findall(r'id="(\w+)"', page))


def test_comparison_page_has_every_row():
    rows = compare(16, [32])
    data = data_of(comparison_page(rows, 16, "unit costs"))
    assert [row["schedule"] for row in data["rows"]] == [row.schedule for row in rows]
    assert all(row["mfu"] is not None for row in data["rows"])
    assert data["model"][0].startswith("Modelled, not measured.")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_page_works_in_a_browser(tmp_path):
    page = schedule_page(simulate(build("dualpipe", num_ranks=8, num_microbatches=20)))
    elements = dump(page.replace("</html>", USER), tmp_path)
    shown = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", elements)[0]))
    assert shown["ready"] == "1"
    assert shown["tip"].splitlines()[:3] == ["rank 0", "0F0", "time 0 to 1"]
    assert float(shown["shown"]) == 36  # half of the coupled makespan
    assert 0 < float(shown["clock"]) < 72
    assert "bubble 16.67% (neighbour)" in elements


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_comparison_works_in_a_browser(tmp_path):
    elements = dump(comparison_page(compare(4, [8, 16]), 4, "unit costs"), tmp_path)
    assert 'data-ready="1"' in elements
    assert "Bubble, P=4; unit costs" in elements
    assert elements.count('class="bar"') == len(compare(4, [8, 16]))
