"""`source …`: databases elsewhere whose tables are mirrored. `add` declares a source and `show`
shows sources; `requests` has what is requested of a running source, and `run` runs sources. What a
source is and how it is run is in `headwater.capture`.
"""
