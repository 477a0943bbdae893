"""Numbers with units, as text."""


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1536), format_bytes(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(43e-6)
    ('12 ms', '2.5 s', '43 us')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def format_count(number: float) -> str:
    """
    >>> format_count(1.19e14), format_count(850)
    ('119 T', '850')
    """
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"
