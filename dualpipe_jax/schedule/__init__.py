"""Pipeline schedules: build, check, simulate, lower, draw. Needs numpy only.

schedule = build("dualpipe", num_ranks=8, num_microbatches=20)
table = lower(schedule)
"""

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule, format_cell, parse_action, parse_cell
from dualpipe_jax.schedule.bound import lower_bound
from dualpipe_jax.schedule.builders import BUILDERS, build, nearest_microbatches
from dualpipe_jax.schedule.comparison import Row, compare
from dualpipe_jax.schedule.costs import MOE_COSTS, Costs
from dualpipe_jax.schedule.dualpipe import dualpipe
from dualpipe_jax.schedule.dualpipe_v import dualpipe_v
from dualpipe_jax.schedule.graph import ScheduleError
from dualpipe_jax.schedule.greedy import Policy, list_schedule
from dualpipe_jax.schedule.group import group
from dualpipe_jax.schedule.lower import lower
from dualpipe_jax.schedule.memory import Memory, peak_memory
from dualpipe_jax.schedule.one_f_one_b import one_f_one_b
from dualpipe_jax.schedule.placement import Placement
from dualpipe_jax.schedule.replay import validate_table
from dualpipe_jax.schedule.report import Bytes, peak_bytes, phases, report, side_by_side
from dualpipe_jax.schedule.search import Found, auto, search
from dualpipe_jax.schedule.simulate import Mode, Simulation, simulate
from dualpipe_jax.schedule.table import Segment, TickTable, concatenate_tables
from dualpipe_jax.schedule.text import format_schedule, parse_schedule
from dualpipe_jax.schedule.ticks import tick_schedule
from dualpipe_jax.schedule.validate import validate

__all__ = [
    "build",
    "nearest_microbatches",
    "BUILDERS",
    "one_f_one_b",
    "dualpipe",
    "dualpipe_v",
    "Action",
    "Cell",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "format_cell",
    "parse_action",
    "parse_cell",
    "format_schedule",
    "parse_schedule",
    "validate",
    "group",
    "auto",
    "search",
    "Found",
    "lower_bound",
    "peak_memory",
    "Memory",
    "Policy",
    "list_schedule",
    "tick_schedule",
    "Costs",
    "MOE_COSTS",
    "Mode",
    "Simulation",
    "simulate",
    "side_by_side",
    "report",
    "phases",
    "Bytes",
    "peak_bytes",
    "compare",
    "Row",
    "lower",
    "TickTable",
    "Segment",
    "validate_table",
    "concatenate_tables",
]
