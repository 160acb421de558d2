"""The curve of losses: few points for any number of steps, and axes that show what matters."""
from qie_nb.widgets.loss_curve import Curve, curve_axes


def test_a_full_curve_has_points_that_stand_for_equally_many_steps():
    curve = Curve(most=4)
    for step in range(16):
        curve.add(step, float(step))
    assert curve.all() == [(7, 3.5), (15, 11.5)]
    curve.add(16, 100.)
    assert curve.all()[-1] == (16, 100.), "values that do not fill a point yet are shown, too"


def test_a_lower_loss_is_drawn_lower():
    axes = curve_axes([(0, 1.), (10, 0.2)], [], 440, 212)
    assert axes.y(0.2) > axes.y(1.) and axes.x(10) > axes.x(0), "pixels are counted from the top"
    assert axes.y(50.) == axes.y(axes.hi), "an outlier is at the edge"


def test_the_axes_hold_all_held_out_losses_and_no_single_outlier():
    losses = [(step, 1.) for step in range(100)]
    assert curve_axes(losses, [(50, 9.)], 440, 212).hi >= 9.
    assert curve_axes(losses, [], 440, 212).hi < 9.
    losses[50] = (50, 60.)
    assert curve_axes(losses, [], 440, 212).hi < 60.
