"""The environment variables of dtorch: what each is for, and what it says with the value that it has."""

from __future__ import annotations

from dtorch_core import recorder
from dtorch_core._selection import catalogue
from dtorch_core._selection.authority import VARIABLES
from dtorch_core._selection.discovery import DISABLE, LOAD, STRICT
from dtorch_core._text import did_you_mean

KNOWN = {
    **{variable: f"the {kind} backend to use" for kind, variable in VARIABLES.items()},
    DISABLE: "plugins that are not loaded",
    LOAD: "the only plugins that are loaded",
    STRICT: "a broken plugin is an error",
    recorder.VARIABLE: "how many calls of each group the flight recorder keeps",
    **catalogue.VARIABLES,
}
"""Those that dtorch-core and its first-party plugins read, and what each is for."""

SWITCHES = {
    STRICT: catalogue.Switch("a broken plugin is left out", "a broken plugin is an error", unset="off"),
    **catalogue.SWITCHES,
}
"""Those that are on or off."""


def meaning(name: str, value: str) -> str:
    """What is so with this value."""
    switch = SWITCHES.get(name)
    if switch is None:
        hint = f"read by no part of dtorch.{did_you_mean(name, KNOWN)}"
        return KNOWN.get(name, hint)

    word = value.strip()
    if word == "0":
        return f"off: {switch.off}"

    if word == "1":
        return f"on: {switch.on}"

    if not word:
        return f"{switch.unset}, as if it were not set: {switch.on if switch.unset == 'on' else switch.off}"

    return f"WARNING: {word!r} counts as 1, and 0 alone is off. On: {switch.on}"
