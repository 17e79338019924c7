"""A page of figures and tables: README.md with figures/ beside it, and the same in one file, report.html."""

import base64
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import markdown
from cli import error
from scripts import BENCHMARK

Rows = list[dict[str, str]]


@dataclass
class Section:
    title: str
    introduction: list[str] = field(default_factory=list)
    """lines; the contents show them too"""
    figures: dict[str, bytes] = field(default_factory=dict)
    """PNG by file name"""
    parts: list[list[str] | Rows] = field(default_factory=list)
    """each a table, or lines of Markdown"""


def filled(rows: Rows) -> list[str]:
    """The columns of a table in which something stands."""
    return [name for name in rows[0] if any(row[name] not in ("", "-") for row in rows)]


def environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(BENCHMARK / "templates")
    made = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters["filled"] = filled
    return made


def table(rows: Rows) -> str:
    """The rows as a Markdown table, without the columns in which nothing stands."""
    return environment().get_template("table.md.jinja").module.table(rows)


def write_page(
    out: Path, title: str, text: str, command: str, headlines: Rows, sections: list[Section]
) -> None:
    """Write the page: its headlines, the contents, a text, the command that makes it, and the sections."""
    shown = {"title": title, "text": text, "command": command, "headlines": headlines, "sections": sections}
    page = environment().get_template("page.md.jinja").render(shown)
    figures = {name: png for section in sections for name, png in section.figures.items()}
    body = markdown.markdown(page, extensions=["fenced_code", "tables", "toc"])
    for name, png in figures.items():
        body = body.replace(f"figures/{name}", f"data:image/png;base64,{base64.b64encode(png).decode()}")
    html = environment().get_template("page.html.jinja").render(title=title, body=body)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for name, png in figures.items():
            (out / "figures" / name).write_bytes(png)
        (out / "README.md").write_text(page)
        (out / "report.html").write_text(html)
    except OSError as exception:
        error(f"cannot write to {out}: {exception}")
