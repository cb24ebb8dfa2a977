"""The set-up of a run or a sweep, read from run.json, in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from weft.plan.layout import Layout

ONE_DEVICE = str(Layout())


def layouts_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Layouts it was trained in, in order; empty if it was one device throughout."""
    listed = info.get("layouts")
    result = tuple(str(layout) for layout in listed) if isinstance(listed, list) else ()
    return () if set(result) <= {ONE_DEVICE} else result


def layout_of(info: Mapping[str, Any]) -> str | None:
    """The same in words."""
    return ", then ".join("one device" if name == ONE_DEVICE else name for name in layouts_of(info)) or None


def made_with(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values; unknown ones are left out."""
    known = [(key, info.get(key)) for key in ("base_model", "device", "dtype", "quantize", "kernels")]
    about = [(key.replace("base_model", "backbone"), str(value)) for key, value in known if value not in (None, "none")]
    layout = layout_of(info)
    if layout is not None:
        about.append(("layout", layout))
    if info.get("capacity"):
        about.append(("capacity", f"{info['capacity']} tokens"))
    versions = info.get("versions")
    if isinstance(versions, Mapping):
        about += [(str(name), str(version)) for name, version in versions.items() if version]
    started = _moment(info.get("started_at"))
    return [*about, ("started", started)] if started else about


def _moment(text: Any) -> str | None:
    try:
        return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M %Z").strip()
    except (TypeError, ValueError):
        return None
