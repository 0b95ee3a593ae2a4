"""Log-log line plots as SVG, without a plotting package: text that every browser and a diff can read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 236, 44, 52
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8d5a97", "#c77d00", "#4d4d4d", "#2a9d8f", "#7a4419")


def log_log(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """An SVG document of lines through points with positive coordinates; y in seconds.

    Raises:
        ValueError: there is no point.
    """
    points = [p for line in lines.values() for p in line]
    if not points:
        raise ValueError(f"nothing to plot for '{title}'")
    x, y = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT), _Axis([p[1] for p in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 24, title, size=15, weight="600"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
        f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)">{_text(0, 0, y_label, anchor="middle")}</g>',
        *_grid(x, y),
    ]
    # Labels stand where their lines end, pushed apart.
    ends = sorted(((y.at(line[-1][1]), name) for name, line in lines.items()), reverse=True)
    labels: dict[str, float] = {}
    below = HEIGHT - BOTTOM + 16.0
    for end, name in ends:
        below = min(end, below - 16)
        labels[name] = below
    for colour, (name, line) in zip(_cycled(len(lines)), lines.items(), strict=True):
        parts += _line(name, [(x.at(a), y.at(b)) for a, b in line], colour, labels[name])
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """A logarithmic scale from whole decades of values to pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.low = math.floor(math.log10(min(values)) + 1e-9)
        self.high = max(self.low + 1, math.ceil(math.log10(max(values)) - 1e-9))
        self.first, self.last = first, last

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def decades(self) -> list[float]:
        return [10.0**i for i in range(self.low, self.high + 1)]


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for value in x.decades():
        at = x.at(value)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, f"{value:,.0f}", anchor="middle"))
    for value in y.decades():
        at = y.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 8, at + 4, seconds(value), anchor="end"))
    return parts


def _line(name: str, points: Points, colour: str, label_at: float) -> list[str]:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
    a, b = points[-1]
    to_label = f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{WIDTH - RIGHT + 8}" y2="{label_at:.1f}" stroke="{colour}" opacity="0.35"/>'
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *dots,
        to_label,
        _text(WIDTH - RIGHT + 12, label_at + 4, name, colour=colour),
    ]


def _cycled(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "400", colour: str = "#222"
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def seconds(value: float) -> str:
    """A time with a unit that suits it, to three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
