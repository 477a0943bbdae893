"""A console of rich that escapes control characters in what it prints."""

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from jaxmem.errors import escaped


class Console(rich.console.Console):
    """Prints tables and lines. Names of files and columns in them can contain commands for a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
