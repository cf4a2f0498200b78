"""Settings: from the call, else the environment (`HEADWATER_…`), else `headwater.toml`.

`groups` has every setting with its default and what is derived from it, and checks its values;
`checks` and `durations` read single values. `names` says what a setting is called in the file, in
the environment and in a call, and `loading` reads them there. `sources` reads the sources.
Bounds that are no settings are in `headwater.limits`.
"""

from headwater.settings.groups import Settings
from headwater.settings.loading import load_settings, make_settings

__all__ = ["Settings", "load_settings", "make_settings"]
