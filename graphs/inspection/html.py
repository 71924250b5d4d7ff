"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compiled_engine.graphs.inspection.highlight import highlight
from compiled_engine.graphs.inspection.kernels import kernels_of, without_kernel_sources
from compiled_engine.graphs.inspection.repeats import fold
from compiled_engine.graphs.inspection.report import Report
from compiled_engine.graphs.inspection.sections import facts, sections

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Bar:
    """A row of a waterfall; `left` and `width` in percent of the whole."""

    name: str
    depth: int
    start_s: float
    seconds: float
    left: float
    width: float


def render_html(report: Report) -> str:
    """The page; its style, script and all texts are inside."""
    data, texts = report.data, report.texts
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": _seconds, "bytes": _bytes, "short": lambda key: key[:8]}
    environment.globals |= {
        "text": lambda name, language: highlight(texts[name], language),
        "code": highlight,
        "kernels_of": lambda piece: [asdict(kernel) for kernel in kernels_of(texts[piece["source"]])],
        "launcher": lambda piece: without_kernel_sources(texts[piece["source"]]),
        "fold": fold,
        "embedded": lambda name: (TEMPLATES / name).read_text(encoding="utf-8"),
    }
    piece_names = {piece["key"]: piece["name"] for piece in data["pieces"]}
    return environment.get_template("report.html").render(
        report=data,
        texts=texts,
        config_rows=list(_rows("", _shown_config(data["config"]))),
        factor_rows=list(_rows("", data["cache"].get("factors", {}))),
        waterfalls={name: _waterfall(spans, piece_names) for name, spans in data["phases"].items()},
        piece_names=piece_names,
        guards=_by_reason(data["guards"]),
        sections=sections(data),
        facts=facts(data),
        start_up_title=(
            "This process, which looked the entry up"
            if data["metrics"] is None
            else "This start-up, up to the first token"
        ),
        kernel_kinds=list(
            dict.fromkeys(kind for counts in data["kernels_per_step"].values() for kind in counts["by_kind"])
        ),
        measured_kernels=(data["metrics"] or {}).get("kernels_per_decode_step"),
    )


def _shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings of CUDA graphs on a CPU."""
    return {name: value for name, value in config.items() if name != "graph" or config["device"] != "cpu"}


def _waterfall(spans: list[Mapping[str, Any]], piece_names: Mapping[str, str]) -> list[Bar]:
    """The spans as bars on one scale, each under its parent, in the order of their start."""
    if not spans:
        return []
    first = min(span["start_s"] for span in spans)
    whole = max(span["start_s"] + span["seconds"] for span in spans) - first or 1.0
    parents = {span["name"]: span["parent"] for span in spans}

    def depth(name: str) -> int:
        parent = parents[name]
        return 1 + depth(parent) if parent in parents else 0

    return [
        Bar(
            name=_stage_name(span["name"], piece_names),
            depth=depth(span["name"]),
            start_s=span["start_s"] - first,
            seconds=span["seconds"],
            left=100 * (span["start_s"] - first) / whole,
            width=100 * span["seconds"] / whole,
        )
        for span in sorted(spans, key=lambda span: span["start_s"])
    ]


def _by_reason(guards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Guards of several kinds that hold for the same reason, together."""
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for guard in guards:
        together.setdefault((guard["subject"], guard["discharged"]), []).append(guard)
    return [
        {"subject": subject, "discharged": discharged, "kinds": kinds, "count": sum(kind["count"] for kind in kinds)}
        for (subject, discharged), kinds in together.items()
    ]


def _stage_name(name: str, piece_names: Mapping[str, str]) -> str:
    """`piece <key>` with the name that the piece has in the report."""
    key = name.removeprefix("piece ")
    return f"piece {piece_names[key]}" if key in piece_names else name


def _rows(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A nested dict as (dotted name, value as text); the reasons of a configuration are not values."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            if prefix or name != "reasons":
                yield from _rows(f"{prefix}{name}.", item)
        else:
            yield prefix + name, _value(item)


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and all(item == value[0] for item in value):
        return f"{value[0]} ({len(value)} times)"
    return ", ".join(map(str, value)) or "none"


def _seconds(value: float) -> str:
    """Three digits: 1.23 s, 45.6 ms."""
    scaled, unit = (value, "s") if value >= 1 else (value * 1000, "ms")
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"


def _bytes(value: int) -> str:
    scaled, unit = (value / (1 << 20), "MiB") if value < 1 << 30 else (value / (1 << 30), "GiB")
    return f"{scaled:.1f} {unit}"
