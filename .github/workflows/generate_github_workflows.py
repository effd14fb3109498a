"""Make each NAME.yml of this folder out of its NAME.yml.j2 and of what test files declare (docs/ci.md).

python .github/workflows/generate_github_workflows.py           # write what differs
python .github/workflows/generate_github_workflows.py --check   # write nothing; status 1 where one differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
except ImportError:
    print(f"{Path(__file__).name}: error: {sys.executable} has no Jinja2; pip install Jinja2", file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ci.registry import RegistryError, plan, read_all

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = Path(__file__).name
BANNER = """\
# Do not edit: made out of {template} and the LABELS of test files.
# Edit those, run python .github/workflows/generate_github_workflows.py
# and commit its result, too.
"""


def environment() -> Environment:
    """Of the templates here: ``<% %>``, ``<< >>`` and ``<# #>`` leave GitHub's ``${{ }}`` alone."""
    made = Environment(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(HERE, encoding="utf-8"),
    )
    made.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return made


def generated() -> Iterator[tuple[Path, str]]:
    """Path and text of each workflow that has a template.

    Raises:
        RegistryError: a test file declares something wrong, or a template is not a template.
    """
    files = read_all(ROOT)
    for template in sorted(HERE.glob("*.yml.j2")):
        try:
            body = environment().get_template(template.name).render(plan=partial(plan, files=files))
        except TemplateError as error:
            line = getattr(error, "lineno", None)  # of a wrong syntax alone
            raise RegistryError(f"{template.name}{f':{line}' if line else ''}: {error}; mend it") from None
        yield template.with_suffix(""), BANNER.format(template=template.name) + body


def fail(status: int, line: str) -> NoReturn:
    """End with one line."""
    print(f"{PROGRAM}: error: {line}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Write, or check, every workflow that has a template."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and end with status 1 where a file differs"
    )
    check = parser.parse_args().check
    try:
        files = list(generated())
    except RegistryError as error:
        fail(2, str(error))
    different = [path for path, text in files if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and different:
        names = ", ".join(path.name for path in different)
        fail(1, f"{names}: not what template and test files make of it; run python .github/workflows/{PROGRAM}")
    for path, text in files:
        if path in different:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'written' if path in different else 'up to date'}")


if __name__ == "__main__":
    main()
