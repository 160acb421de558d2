"""The plan's decisions: what they come to in a run, and what the table says of them."""
import pytest

from qie_nb.core.choice import Choice, EvalInterval, Plan, RunLength, TimeLimit


def test_a_time_limit_counts_from_the_start_of_the_session_if_that_is_known():
    assert TimeLimit(8.5, since=1000.).end(began=5000.) == 1000 + 8.5 * 3600
    assert TimeLimit(1.).end(began=5000.) == 5000 + 3600


@pytest.mark.parametrize("interval, expected", [
    (EvalInterval(parts=4), (0, 38)),
    (EvalInterval(parts=10), (0, 20)),
    (EvalInterval(epochs=2), (2, None)),
    (EvalInterval(steps=50), (0, 50)),
])
def test_parts_of_a_run_are_rounded_up_and_have_twenty_steps(interval, expected):
    assert interval.of(150) == expected


@pytest.mark.parametrize("length, steps", [
    (RunLength(samples=500), 84),
    (RunLength(samples=500, steps=30), 30),
    (RunLength(epochs=3), 21),
])
def test_a_run_has_at_least_the_samples_that_were_asked_for(length, steps):
    assert length.steps_of(6, per_epoch=7) == steps


def test_the_table_says_what_decided_and_what_is_impossible():
    impossible = Choice(2, "one for each GPU", "train.num_processes", asked=True,
                        problem="`train.num_processes` 2, but there is 1 GPU; use 1")
    dtype = Choice("bfloat16", "native here", "train.mixed_precision")
    plan = Plan(dtype=dtype, processes=impossible)
    assert [tuple(row) for row in plan.rows()] == [
        ("dtype", "bfloat16", "native here", "`train.mixed_precision`"),
        ("processes", "2", impossible.problem, "`train.num_processes` decides"),
    ]
    assert dtype.checked() == "bfloat16"
    with pytest.raises(ValueError, match="but there is 1 GPU; use 1"):
        impossible.checked()


def test_the_lines_of_a_batch_run_have_the_machine_first():
    held = dict(held_out=Choice(0.1), hours=Choice(TimeLimit(8.5)), quantize=Choice(None))
    assert Plan(**held).lines() == ["quantize none", "held out 0.1, stop after 8.5 h"]
