"""Line and bar plots as inline SVG, coloured by the page's CSS variables so that they follow dark mode."""

import math
from collections.abc import Sequence
from html import escape

from torpor.reports.results import Plot

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
MAX_POINTS = 400


def line_plot(plot: Plot) -> str:
    """Draw a plot's curves, axes, reference line and legend.

    Args:
        plot: At least one curve with at least one finite point.

    Returns:
        An `<svg>` element that refers to nothing outside itself.

    Raises:
        ValueError: No finite point to draw.
    """
    points = [[p for p in zip(c.steps, c.values, strict=True) if math.isfinite(p[1])] for c in plot.curves]
    xs = [x for curve in points for x, _ in curve]
    ys = [y for curve in points for _, y in curve]
    if not ys:
        raise ValueError(f"plot {plot.title!r} has no finite point to draw")
    if plot.reference:
        ys.append(plot.reference[1])
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs), 6), nice_ticks(min(0.0, *ys), max(ys), 5)
    x_low, x_high = x_ticks[0], max(x_ticks[-1], max(xs))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">']
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        )
        text = f"{y:.0%}" if plot.percent else tick_text(y, y_ticks)
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{text}</text>')
    for x in x_ticks:
        parts.append(
            f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{tick_text(x, x_ticks)}</text>"
        )
    axis_y = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(plot.x_label)}</text>"
        f'<text class="axis" x="14" y="{axis_y:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {axis_y:.0f})">{escape(plot.y_label)}</text>'
    )
    if plot.reference:
        label, value = plot.reference
        parts.append(
            f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
            f'y1="{py(value):.1f}" y2="{py(value):.1f}"/>'
            f'<text class="reference-label" x="{WIDTH - RIGHT - 4}" y="{py(value) - 6:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )
    for index, (curve, drawn) in enumerate(zip(plot.curves, points, strict=True)):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in thin(drawn))
        parts.append(f'<polyline class="curve c{index}" points="{path}"/>')
        if curve.marked:
            parts.extend(
                f'<circle class="dot c{index}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5">'
                f"<title>{escape(curve.label)}: {y:.4g} at {x:g}</title></circle>"
                for x, y in drawn
            )
    parts.append("</svg>")
    legend = "".join(
        f'<span class="key c{index}"><i></i>{escape(curve.label)}</span>'
        for index, curve in enumerate(plot.curves)
    )
    return f'<div class="legend">{legend}</div>' + "".join(parts)


def thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Keep at most `MAX_POINTS` points, the last one among them, so that a long run makes no heavy page."""
    stride = math.ceil(len(points) / MAX_POINTS) if points else 1
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round values that enclose [low, high] from below and above, about `wanted` of them.

    Example: `nice_ticks(0, 7.3, 5)` is `[0, 2, 4, 6, 8]`.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(wanted - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """Write a tick with as many decimals as its neighbours need to differ."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals and round(step * 10**decimals) * 10**-decimals != round(step, 12):
        decimals += 1
    return f"{value:,.{decimals}f}"
