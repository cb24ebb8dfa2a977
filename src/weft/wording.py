"""How numbers stand in sentences: counts with their noun, sizes with their unit."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,024 steps`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(num_bytes: float) -> str:
    """Bytes as people read them: 812.0 MiB."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return counted(round(num_bytes), "byte") if unit == "bytes" else f"{value:,.1f} {unit}"
