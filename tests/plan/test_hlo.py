"""Reading compiled programs: hand-made ones with known answers, and one of this JAX."""

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax.plan.hlo import Program
from dualpipe_jax.plan.overlap import copied_bytes, exposed, steady_bodies, transfers

HAND_MADE = """HloModule hand_made, is_scheduled=true

%fused (p.0: bf16[8,8], p.1: bf16[8,8]) -> bf16[8,8] {
  %p.0 = bf16[8,8]{1,0} parameter(0)
  %p.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%elementwise (p.2: bf16[8,8]) -> bf16[8,8] {
  %p.2 = bf16[8,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,8]{1,0} add(%p.2, %p.2)
}

%tick (state: (s32[], bf16[8,8], bf16[2,8,8])) -> (s32[], bf16[8,8], bf16[2,8,8]) {
  %state = (s32[], bf16[8,8]{1,0}, bf16[2,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[8,8]{1,0} get-tuple-element(%state), index=1
  %kept = bf16[2,8,8]{2,1,0} get-tuple-element(%state), index=2
  %a2a = ((bf16[8,8]{1,0}), bf16[8,8]{1,0}) all-to-all-start(%x), metadata={op_name="jit(f)/forward_0_0/all_to_all"}
  %m.1 = bf16[8,8]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused
  %e.1 = bf16[8,8]{1,0} fusion(%m.1), kind=kLoop, calls=%elementwise
  %m.2 = bf16[8,8]{1,0} custom-call(%e.1, %x), custom_call_target="__cublas$gemm"
  %a2a.done = bf16[8,8]{1,0} all-to-all-done(%a2a)
  %send = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) collective-permute-start(%a2a.done), source_target_pairs={{0,1}}
  %e.2 = bf16[8,8]{1,0} fusion(%m.2), kind=kLoop, calls=%elementwise
  %sent = bf16[8,8]{1,0} collective-permute-done(%send)
  %sync = bf16[8,8]{1,0} all-to-all(%sent), dimensions={0}
  %copied = bf16[2,8,8]{2,1,0} copy(%kept)
  ROOT %out = (s32[], bf16[8,8]{1,0}, bf16[2,8,8]{2,1,0}) tuple(%i, %sync, %copied)
}

%more (state.1: (s32[], bf16[8,8], bf16[2,8,8])) -> pred[] {
  %state.1 = (s32[], bf16[8,8]{1,0}, bf16[2,8,8]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (arg: (s32[], bf16[8,8], bf16[2,8,8])) -> (s32[], bf16[8,8], bf16[2,8,8]) {
  %arg = (s32[], bf16[8,8]{1,0}, bf16[2,8,8]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[8,8]{1,0}, bf16[2,8,8]{2,1,0}) while(%arg), condition=%more, body=%tick
}
"""


@pytest.fixture(scope="module")
def program():
    return Program.parse(HAND_MADE)


def test_what_runs_behind_each_message(program):
    (body,) = steady_bodies(program)
    found = transfers(program, body)
    assert [(t.kind, t.bytes, t.matmuls, t.others) for t in found] == [
        ("all-to-all", 128, 2, 1),
        ("collective-permute", 128, 0, 1),
        ("all-to-all", 128, None, None),
    ]
    assert found[0].op_name == "jit(f)/forward_0_0/all_to_all"
    assert exposed(found) == found[1:]


def test_copies_in_loops_count_those_in_fusions_and_entry_do_not(program):
    assert copied_bytes(program) == 2 * 8 * 8 * 2
    assert copied_bytes(program, at_least=257) == 0
    assert {c.name for c in program.executed()} == {"main", "tick", "more"}


def test_matmuls_are_found_through_calls(program):
    assert program.multiplying == {"fused", "tick", "main"}


def test_a_program_of_this_jax():
    def f(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)

    parsed = Program.parse(jax.jit(f).lower(jnp.ones((8, 8)), jnp.ones((2, 8))).compile().as_text())
    assert parsed.entry in parsed.computations
    assert parsed.multiplies(next(i for c in parsed.executed() for i in c.find("while")))
