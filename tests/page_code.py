"""The Python code of a page."""

import re
from pathlib import Path


def programs_of(page: Path) -> list[str]:
    """Returns the program of each snippet. A snippet without imports needs the one before it that has imports.

    Snippets whose language is "py" are not run, because they need what only a reader has, such as the files of a model.
    """
    programs, first = [], ""
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        imports = re.search(r"^(?:import|from) ", code, re.MULTILINE)
        first = code if imports else first
        programs.append(code if imports else f"{first}\n\n{code}")
    return programs
