"""Pictures: every action is drawn once, where and when it runs."""

import re

import pytest
from matplotlib import image

from dualpipe_jax.schedule import Costs, build, simulate
from dualpipe_jax.schedule.render import boxes, draw_png, text_grid


def test_boxes_cover_the_busy_time():
    simulation = simulate(build("dualpipe", num_ranks=4, num_microbatches=10), Costs(pair=2.5))
    found = boxes(simulation)
    assert len(found) == sum(len(cell) for cells in simulation.schedule.ranks for cell in cells)
    for rank, work in enumerate(simulation.work_per_rank):
        assert sum(b.width / b.lanes for b in found if b.rank == rank) == pytest.approx(work)
    assert {b.shade for b in found} == {0, 1}


def test_grid_has_a_column_a_tick():
    grid = text_grid(build("dualpipe_v", num_ranks=2, num_microbatches=4))
    assert grid.splitlines()[0].split()[2:8] == ["F0", "F1", "F2", "f0", "i0", "w0"]
    coloured = text_grid(build("dualpipe_v", num_ranks=2, num_microbatches=4), colour=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == grid.splitlines()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draws(tmp_path, suffix):
    path = tmp_path / f"schedule.{suffix}"
    draw_png(build("dualpipe", num_ranks=4, num_microbatches=8), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_title_says_the_bubble(tmp_path):
    path = tmp_path / "schedule.svg"
    draw_png(simulate(build("1f1b", num_ranks=4, num_microbatches=8), mode="async"), path)
    assert "1f1b: 4 ranks, 8 microbatches, bubble 27.3% (async)" in path.read_text()


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 4, 8), ("1f1b", 1, 2), ("dualpipe_v", 2, 12)])
def test_nothing_is_cut_off(tmp_path, name, ranks, microbatches):
    """Narrow and flat figures have room for title and legend: the outermost pixels are white."""
    path = tmp_path / "schedule.png"
    draw_png(build(name, num_ranks=ranks, num_microbatches=microbatches), path)
    pixels = image.imread(path)
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    assert all(edge.min() == 1 for edge in edges)
