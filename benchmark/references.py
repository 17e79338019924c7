"""Published returns, as references.toml has them."""

import tomllib
from functools import cache

from matplotlib.ticker import EngFormatter
from records import Record
from scripts import BENCHMARK


@cache
def references() -> dict:
    return tomllib.loads((BENCHMARK / "references.toml").read_text())


def published(runs: list[Record]) -> list[dict]:
    """The references for the environment, algorithm and settings of any of the runs, lowest first."""

    def matches(known: dict, run: Record) -> bool:
        same = known["env_id"] == run.env_id and {*known["algorithms"]} & {*run.script.split("_")}
        return same and all(str(run.config.get(k)) in vs for k, vs in known.get("settings", {}).items())

    known = [r for r in references()["references"] if any(matches(r, run) for run in runs)]
    return sorted(known, key=lambda reference: reference["value"])


def in_words(reference: dict) -> str:
    """Its source, its return, what its spread is over, and its steps."""
    spread = f" ± {reference['spread']:,}" if "spread" in reference else ""
    details = [f"{EngFormatter(sep='')(reference['steps'])} steps"] if "steps" in reference else []
    details += [f"± over {reference['over']}"] if spread else []
    return f"{reference['source']} {reference['value']:,}{spread}" + (
        f" ({', '.join(details)})" if details else ""
    )
